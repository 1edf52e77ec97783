"""The TPU kernels of wide streams, compiled ahead of time for a v5p: they fit, and move what they must.

Seen to fail: `fits` false for four streams: no kernels of the write, which then moves 4 times as much.
"""

import json

from tests import aot
from tests.test_plan import needs_libtpu


@needs_libtpu
def test_they_compile_and_move_what_they_must():
    found = json.loads(aot.in_a_process("tests.ops.kernels"))
    assert len(found) == 6
    for name, facts in found.items():
        assert facts["kernels"] == (2 if "derivative" in name else 1), name
        assert facts["moved"] < 1.05 * facts["floor"], name
        assert facts["temporaries"] < 16 * 2**20, name
