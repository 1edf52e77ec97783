"""Reading compiled programs: each rule on a few lines of one, whose bytes are counted by hand."""

import textwrap

import pytest

from grlab import hlo, traffic


def moved(text: str) -> traffic.Moved:
    return traffic.moved(hlo.Program("HloModule m, num_partitions=16\n" + textwrap.dedent(text)))


LOOP = """
%inner_body (p: (s32[], f32[8,128], s32[])) -> (s32[], f32[8,128], s32[]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %two = s32[] get-tuple-element(%p), index=2
  %next = s32[] add(%i, %two)
  %y = f32[8,128]{1,0:T(8,128)} add(%x, %x)
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) tuple(%next, %y, %two)
}

%inner_condition (p: (s32[], f32[8,128], s32[])) -> pred[] {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (p: (s32[], f32[8,128], s32[])) -> (s32[], f32[8,128], s32[]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %two = s32[] get-tuple-element(%p), index=2
  %zero = s32[] constant(1)
  %start = (s32[], f32[8,128]{1,0:T(8,128)}, /*index=2*/s32[]) tuple(%zero, %x, %two)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) while(%start), condition=%inner_condition, body=%inner_body
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) tuple(%next, %y, %two)
}

%condition (p: (s32[], f32[8,128], s32[])) -> pred[] {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %two = s32[] constant(2)
  %start = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) tuple(%zero, %x, %two)
  %loop = (s32[], f32[8,128]{1,0:T(8,128)}, s32[]) while(%start), condition=%condition, body=%body
  ROOT %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""
ARRAY = 8 * 128 * 4


def test_nested_loops_count_as_often_as_they_run():
    """5 rounds of 3: the inner one goes from 1 to below 7 in twos, which it is given from outside both."""
    found = moved(LOOP)
    counters = 5 * (4 + 4 + 4 + (4 + 4 + 1)) + 5 * 3 * (4 + 4 + 4 + (4 + 4 + 1))
    assert (found.hbm_bytes, found.unknown_loops) == (5 * 3 * 3 * ARRAY + counters, 0)


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    found = moved(LOOP.replace("direction=LT", "direction=NE", 1))
    assert found.unknown_loops == 1 and 5 * 3 * ARRAY < found.hbm_bytes < 5 * 4 * ARRAY


def test_a_marked_loop_is_believed():
    marked = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"50"}}')
    assert 50 * 3 * 3 * ARRAY < moved(marked).hbm_bytes < 50 * 3 * 3.1 * ARRAY


FUSED = """
%fused (stack: bf16[4,64,256], i: s32[], x: bf16[64,256]) -> (bf16[4,64,256], bf16[64,256]) {
  %stack = bf16[4,64,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[64,256]{1,0} parameter(2)
  %flat = bf16[4,16384]{1,0} bitcast(%stack)
  %zero = s32[] constant(0)
  %one = bf16[1,16384]{1,0} dynamic-slice(%flat, %i, %zero), dynamic_slice_sizes={1,16384}
  %row = bf16[64,256]{1,0} bitcast(%one)
  %sum = bf16[64,256]{1,0} add(%row, %x)
  %new = bf16[1,64,256]{2,1,0} bitcast(%sum)
  %written = bf16[4,64,256]{2,1,0} dynamic-update-slice(%stack, %new, %i, %zero, %zero)
  ROOT %both = (bf16[4,64,256]{2,1,0}, bf16[64,256]{1,0}) tuple(%written, %sum)
}

ENTRY %main (stack: bf16[4,64,256], i: s32[], x: bf16[64,256]) -> (bf16[4,64,256], bf16[64,256]) {
  %stack = bf16[4,64,256]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[64,256]{1,0} parameter(2)
  ROOT %f = (bf16[4,64,256]{2,1,0}, bf16[64,256]{1,0:T(8,128)S(1)}) fusion(%stack, %i, %x), kind=kLoop, calls=%fused
}
"""


def test_a_slice_of_a_stack_is_read_and_written_and_no_more():
    """One layer's slice read, x read, one slice written; the second result stays on the chip."""
    assert moved(FUSED).hbm_bytes == 3 * 64 * 256 * 2 + 4


def test_an_operand_that_is_used_whole_is_read_once():
    zero = "  %zero = s32[] constant(0)\n"
    whole = FUSED.replace(zero, zero + "  %all = f32[] reduce(%stack, %zero)\n", 1)
    assert moved(whole).hbm_bytes == (4 + 2) * 64 * 256 * 2 + 4


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        ("f32[64,8] all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", "all-gather", 7 * 256),
        ("f32[1,8] reduce-scatter(%x), replica_groups=[2,8]<=[16]", "reduce-scatter", 7 / 8 * 256),
        ("f32[8,8] all-reduce(%x), replica_groups=[8,2]<=[2,8]T(1,0)", "all-reduce", 256),
        ("f32[8,8] all-to-all(%x), replica_groups=mesh['a'=4,'b'=4] {'a'}", "all-to-all", 3 / 4 * 256),
        (
            "f32[8,8] all-reduce(%x), replica_groups=mesh['a'=4,'b'=2,'c'=2], device_ids=([2,2,4]T(2,1,0)) {'a','c'}",
            "all-reduce",
            2 * 7 / 8 * 256,
        ),
        ("f32[8,8] all-reduce(%x), replica_groups={}", "all-reduce", 2 * 15 / 16 * 256),
        ("f32[8,8] collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", 256),
    ],
)
def test_a_collective_sends_what_its_group_asks_for(line, kind, sent):
    found = moved(
        f"ENTRY %main (x: f32[8,8]) -> f32[] {{\n  %x = f32[8,8]{{1,0}} parameter(0)\n  ROOT %y = {line}\n}}\n"
    )
    assert (found.counts, found.sent_bytes) == ({kind: 1}, {kind: pytest.approx(sent)})


@pytest.mark.parametrize(("op", "attribute"), [("call", "to_apply"), ("async", "calls")])
def test_an_asynchronous_computation_counts_once(op, attribute):
    """Where it is started: what waits for it names no computation."""
    program = f"""
        %twice (x: f32[8,8]) -> f32[8,8] {{
          %x = f32[8,8]{{1,0}} parameter(0)
          ROOT %y = f32[8,8]{{1,0}} add(%x, %x)
        }}

        ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
          %x = f32[8,8]{{1,0}} parameter(0)
          %s = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}, u32[]) {op}-start(%x), {attribute}=%twice
          ROOT %d = f32[8,8]{{1,0}} {op}-done(%s)
        }}
        """
    assert moved(program).hbm_bytes == 3 * 256


def test_an_asynchronous_collective_counts_once():
    pair = """
    ENTRY %main (x: f32[8,8]) -> f32[8,8] {
      %x = f32[8,8]{1,0} parameter(0)
      %s = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3
      ROOT %d = f32[8,8]{1,0} collective-permute-done(%s)
    }
    """
    found = moved(pair)
    assert (found.counts, found.hbm_bytes) == ({"collective-permute": 1}, 2 * 256)


def test_a_collective_that_is_spread_over_fusions_counts_where_it_begins():
    """As the TPU compiler hides one behind products: the fusions have its parts, in loops inside, too."""
    config = """backend_config={"async_collective_fusion_config":{"flag_start":"START","flag_end":"8"}}"""
    part = """
    %NAME (a: f32[8,8], b: f32[128,8]) -> (f32[8,8], f32[128,8]) {
      %a = f32[8,8]{1,0} parameter(0)
      %b = f32[128,8]{1,0} parameter(1)
      %g = f32[128,8]{1,0} all-gather(%a), channel_id=7, replica_groups={}, dimensions={0}, CONFIG
      ROOT %t = (f32[8,8]{1,0}, f32[128,8]{1,0}) tuple(%a, %g)
    }
    """.replace("CONFIG", config)
    main = """
    ENTRY %main (x: f32[8,8], y: f32[128,8]) -> (f32[8,8], f32[128,8]) {
      %x = f32[8,8]{1,0} parameter(0)
      %y = f32[128,8]{1,0} parameter(1)
      %f = (f32[8,8]{1,0}, f32[128,8]{1,0}) fusion(%x, %y), kind=kCustom, calls=%first
      ROOT %h = (f32[8,8]{1,0}, f32[128,8]{1,0}) fusion(%x, %y), kind=kCustom, calls=%second
    }
    """
    first, second = part.replace("NAME", "first"), part.replace("NAME", "second").replace("START", "2")
    found = moved(first.replace("START", "-1") + second + main)
    assert (found.counts, found.sent_bytes, found.hbm_bytes) == ({"all-gather": 1}, {"all-gather": 15 * 256}, 17 * 256)
    assert moved(first.replace("START", "2") + second + main).counts == {}


def test_an_all_reduce_of_which_a_chip_keeps_its_slice_is_a_reduce_scatter():
    text = """
    %scatter (a: f32[16,8]) -> f32[1,8] {
      %a = f32[16,8]{1,0} parameter(0)
      %r = f32[16,8]{1,0} all-reduce(%a), channel_id=1, replica_groups=[1,16]<=[16]
      %id = u32[] partition-id()
      %zero = u32[] constant(0)
      ROOT %s = f32[1,8]{1,0} dynamic-slice(%r, %id, %zero), dynamic_slice_sizes={1,8}
    }

    ENTRY %main (x: f32[16,8]) -> f32[1,8] {
      %x = f32[16,8]{1,0} parameter(0)
      ROOT %f = f32[1,8]{1,0} fusion(%x), kind=kCustom, calls=%scatter
    }
    """
    found = moved(text)
    assert found.counts == {"reduce-scatter": 1} and found.sent_bytes == {"reduce-scatter": 15 / 16 * 512}
