"""The fields of every run: what each is, and the value it has unless a scale or a row says otherwise.

A scale (`configs/scales.py`) sets shapes, batch and length; a row (`configs/gr.py`, ...) sets `residual` and its own
learning rate and nothing else. Any field can be overridden on the command line: `--config.optim.lr=3e-3`.
"""

import ml_collections
from ml_collections import config_dict

from configs import scales


def residual(config: ml_collections.ConfigDict, kind: str, **switches) -> ml_collections.ConfigDict:
    """`config.residual` of a row: its kind, that kind's switches, and the switches that every kind has."""
    common = {
        "gated_norm": 0,  # rank of a gate on each norm before a sublayer and the head (GatedNorm); 0: none
        # float32 | bfloat16 | float8_e4m3fn (GR; saves memory with remat=full); unless set, model.compute_dtype's
        "stream_dtype": config.model.get_ref("compute_dtype").identity(),  # a reference of its own
    }
    return ml_collections.ConfigDict({"kind": kind, **switches, **common})


def get_config(scale: str = "cpu") -> ml_collections.ConfigDict:
    """The base config at `scale`, with the pre-norm residual; rows replace `config.residual`."""
    c = ml_collections.ConfigDict()
    c.row = "prenorm"  # the config file's name: names the run in wandb and in the tables
    c.scale = scale
    c.seed = 0  # of the initial values and the order of the data; what is evaluated is the same for every seed
    c.seeds = ""  # train only: several seeds in one program, how many (3) or which (0,1,5); empty: the one of `seed`
    c.steps = 2000  # optimizer updates
    c.batch_size = 16  # sequences an update, over all devices and accumulation steps
    c.seq_len = 128  # tokens a sequence

    m = c.model = ml_collections.ConfigDict()
    m.layers = 8  # each is two sites: the mixer, then the feed-forward
    m.width = 64
    m.heads = 2  # query heads
    m.kv_heads = 1  # key and value heads, shared by groups of query heads
    m.head_dim = 32
    m.ffn = 192  # hidden width of the SwiGLU
    m.rope_theta = 10_000.0
    m.vocab = 0  # rows of the embedding and the head; 0: as many as the tokenizer has ids
    m.norm_eps = 1e-6
    m.embed_std = 0.02  # standard deviation of the initial token embedding
    m.compute_dtype = "float32"  # float32 | bfloat16: matrix products and sublayers; parameters are float32
    m.rope_fraction = 1.0  # of a head's channels that RoPE turns: the first
    m.output_gate = False  # attention's outputs times σ(W x), a gate for each head and channel
    # The token mixers of a period of layers, repeated to the depth: attention | gdn (Gated DeltaNet) | qsa (sparse).
    m.pattern = "attention"
    m.separate_documents = False  # attention, states and convolutions end where a document does
    g = m.gdn = ml_collections.ConfigDict()
    g.key_heads = 2
    g.value_heads = 4  # a multiple of key_heads
    g.key_dim = 16  # channels of a key head
    g.value_dim = 16
    g.conv = 4  # taps of the convolutions before it
    g.chunk = 64  # tokens worked on at once: changes the speed, not the result
    q = m.qsa = ml_collections.ConfigDict()
    q.budget = 64  # tokens that a query looks at in blocks of its choice
    q.block = 4  # tokens of a block
    q.heads = 4  # of the indexer
    q.head_dim = 32
    q.loss = 1.0  # weight of the indexer's loss; no other parameter has a gradient of it
    e = m.moe = ml_collections.ConfigDict()
    e.experts = 0  # 0: one feed-forward network of model.ffn for all tokens
    e.top_k = 2  # experts a token
    e.ffn = 64  # hidden width of an expert
    e.shared = 64  # hidden width of the expert that all tokens share; 0: none
    e.balance = 0.001  # weight of the load-balance loss
    n = m.ngram = ml_collections.ConfigDict()
    n.layers = ""  # layers that n-gram embeddings are added before, from 1 on and separated by commas: "2"
    n.size = 3  # of the longest n-gram
    n.heads = 8  # hashes of each size from 2 on
    n.rows = 10_000  # rows of each hash's table, rounded up to a prime
    n.multiple = 128  # the rows of all tables together are filled up to a multiple of this
    n.width = 64  # channels looked up, of all hashes together
    n.conv = 4  # taps of its convolution
    n.seed = 1234  # of the hashes
    m.scan = True  # run the layers by one scan; false: a Python loop, the same function
    # none | dots | streams | full: what the backward pass computes again. Nothing; all but the products with weights;
    # the connections alone, from one stream a block of layers; everything, from one stream a layer. On a CPU a layer is
    # sooner computed again than fetched.
    m.remat = "full"
    m.remat_block = 0  # remat=streams: the layers of a block, at most; 0: as many as take the least memory

    c.residual = residual(c, "prenorm")

    o = c.optim = ml_collections.ConfigDict()
    o.name = "adamw"  # adamw | muon: the linear maps of the sublayers by Muon, all else by AdamW
    o.lr = 3e-3  # the peak
    o.lr_factor = 1.0  # multiplies lr: for a row at twice or four times its own rate
    o.schedule = "cosine"  # cosine | constant, both after the warm-up
    o.warmup = c.get_ref("steps") // 20  # steps of linear warm-up from 0
    o.final_lr = 0.1  # a cosine ends at this fraction of the peak
    o.weight_decay = 0.1  # on the parameters of the decay group alone
    o.b1 = 0.9
    o.b2 = 0.95
    o.eps = 1e-8
    o.clip = 1.0  # bound on the global norm of the gradient
    o.accumulate = 8  # the batch is worked through in this many parts; small ones stay in a CPU core's cache

    d = c.data = ml_collections.ConfigDict()
    d.name = "stdlib"  # stdlib | folder | any TFDS name (tiny_shakespeare, wiki40b/en, ...)
    d.path = config_dict.placeholder(str)  # data.name=folder: the folder of text files
    d.glob = "*.txt"  # data.name=folder: which of its files
    d.dir = config_dict.placeholder(str)  # where prepared datasets are kept; unset: ~/.cache/grlab
    d.heldout = 0.1  # fraction of the documents held out, by hash of the path
    d.text_key = "text"  # other TFDS names: the feature that holds the text
    d.split = "train"  # other TFDS names: the split to read
    d.max_bytes = 2_000_000_000  # stop reading the corpus here
    # A file *.json (of the package tokenizers) or *.model (of SentencePiece); unset: a token is a byte.
    d.tokenizer = config_dict.placeholder(str)

    e = c.eval = ml_collections.ConfigDict()
    e.every = 500  # steps between held-out losses; the benchmarks run once, at the end
    e.tokens = 262_144  # held-out tokens scored, from the start of the held-out documents
    e.batch_size = 8  # sequences a forward pass: changes the speed, not the result
    e.cloze_items = 300  # items a cloze benchmark; 0: no benchmarks
    e.cloze_context = 128  # tokens of context a cloze item may have
    # Any of hellaswag, piqa, arc_easy, arc_challenge (ai2_arc is both), winogrande, openbookqa, boolq (or bool_q) and
    # lambada, with commas between.
    e.downstream = ""
    e.downstream_items = 0  # items of each of them, the first of its split; 0: all

    c.checkpoint = ml_collections.ConfigDict({"every": 500, "keep": 2})  # steps; how many to keep, at least 2
    c.log = ml_collections.ConfigDict({"every": 1})  # steps between records in metrics.jsonl

    w = c.wandb = ml_collections.ConfigDict()
    w.mode = "auto"  # auto ($WANDB_MODE, else online; offline without a key) | online | offline | disabled
    w.project = "grlab"
    w.group = ""  # the experiment, set by the sweep

    # Devices along each axis of the mesh; -1: all that are left. Along `seeds` lie the seeds of config.seeds.
    c.mesh = ml_collections.ConfigDict({"data": -1, "fsdp": 1, "tensor": 1, "expert": 1, "seeds": 1})
    # Which mesh axis a logical axis of a parameter is split over; "" means kept whole. The stream axis never is.
    whole = {"rank": "", "streams": "", "channel": ""}
    c.rules = ml_collections.ConfigDict(
        {"vocab": "tensor", "embed": "fsdp", "heads": "tensor", "mlp": "tensor", "flat": "fsdp"}
        | {"experts": "expert", "ngram": "fsdp"}
        | whole
    )

    c.lock()  # a misspelt field of a scale or a row is an error
    scales.apply(c, scale)
    return c
