"""vLLM's hooks for CUDA whose layers see a whole batch, on the CPU: Gated DeltaNet and attention, under the policy
reference and with vLLM's own metadata.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

from shim.policy import Policy, using
from shim.vllm_plugin.versions import HookError

needs_vllm = pytest.mark.xdist_group("vllm")


@pytest.fixture(scope="module")
def seams():
    """The seams' modules; skips where vLLM is not installed."""
    pytest.importorskip("vllm")
    from shim.vllm_plugin import attention_cuda, gated_delta_net_cuda

    return SimpleNamespace(attention=attention_cuda, gdn=gated_delta_net_cuda)


@pytest.fixture
def reference():
    with using(Policy("reference")):
        yield


def batch(new, lengths, tables, padded=0):
    """vLLM's metadata of sequences with `new` tokens that are the last of `lengths`, tables [N,MB]; then `padded`
    sequences of the null block and as many tokens, as a CUDA graph has them."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *new, *[1] * padded]).cumsum(0).int()
    seq_lens = torch.tensor([*lengths, *[0] * padded], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=sum(new) + padded,
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=torch.cat([tables, tables.new_zeros(padded, tables.shape[1])]),
        slot_mapping=torch.empty(0),
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=torch.tensor([*(n > 1 or n == length for n, length in zip(new, lengths)), *[False] * padded]),
    )


# ---- Gated DeltaNet -------------------------------------------------------------------------------------------------


@pytest.fixture
def delta_net(seams, reference, monkeypatch):
    """(new, lengths, slots, tokens, padded) -> what the core of a layer puts out for a batch, [T,HV,V]: 2 key heads, 4
    value heads of 16, 6 slots in padded pages. Metadata is vLLM's, staged for graphs as on a GPU."""
    generator = torch.Generator().manual_seed(3)
    layer = object.__new__(seams.gdn.ShimGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.refusal, layer.prefix, layer.tp_size, layer.activation = None, "layer", 1, "silu"
    layer.key_dim, layer.value_dim, layer.head_k_dim, layer.head_v_dim = 32, 64, 16, 16
    layer.A_log, layer.dt_bias = torch.rand(4, generator=generator), torch.randn(4, generator=generator)
    layer.conv1d = SimpleNamespace(weight=torch.randn(128, 1, 4, generator=generator), bias=None)
    page = torch.full((6, 3 * 128 + 4 * 256 + 32), torch.nan)
    layer.kv_cache = [page[:, : 3 * 128].unflatten(1, (3, 128)), page[:, 384:1408].unflatten(1, (4, 16, 16))]

    builder = object.__new__(seams.gdn.ShimMetadataBuilder)
    modes = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    vars(builder).update(kv_cache_spec=None, vllm_config=modes, use_spec_decode=False, gdn_prefill_backend="triton")
    vars(builder).update(use_full_cuda_graph=True, decode_cudagraph_max_bs=8, layers=[layer], supports_update_block_table=True)
    vars(builder).update(checkpoint_builder=SimpleNamespace(build=lambda *given: None))
    builder.non_spec_state_indices_tensor = torch.full((8,), 99, dtype=torch.int32)
    builder.non_spec_query_start_loc = torch.zeros(9, dtype=torch.int32)
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(seams.gdn, "get_forward_context", lambda: context)

    def run(new, lengths, slots, tokens, padded=0):
        tables = torch.tensor([[slot, 77] for slot in slots], dtype=torch.int32)
        context.attn_metadata = {"layer": builder.build(0, batch(new, lengths, tables, padded))}
        mixed_qkv, b, a = tokens.split([128, 4, 4], dim=1)
        out = torch.zeros(len(tokens), 4, 16, dtype=tokens.dtype)
        layer._forward_core(mixed_qkv=mixed_qkv.clone(), b=b, a=a, core_attn_out=out)
        return out

    run.layer, run.context, run.builder = layer, context, builder
    return run


def tokens_of(count, seed):
    return torch.randn(count, 136, generator=torch.Generator().manual_seed(seed))


@needs_vllm
def test_prefill_in_chunks_mixed_with_decodes_then_decode_is_one_prefill(delta_net):
    mine, other = tokens_of(12, 4), tokens_of(5, 5)
    whole, alone = delta_net([12], [12], [2], mine), delta_net([5], [5], [3], other)
    delta_net([4], [4], [1], other[:4])
    first = delta_net([7], [7], [5], mine[:7])
    mixed = delta_net([1, 4], [5, 11], [1, 5], torch.cat([other[4:], mine[7:11]]))
    last = delta_net([1], [12], [5], mine[11:])
    torch.testing.assert_close(torch.cat([first, mixed[1:], last]), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mixed[:1], alone[4:], atol=1e-5, rtol=1e-4)


@needs_vllm
def test_padding_of_a_graph_is_zero_and_touches_no_state(delta_net):
    mine = tokens_of(7, 6)
    whole = delta_net([7], [7], [2], mine)
    delta_net([6], [6], [4], mine[:6])
    before = [pool.clone() for pool in delta_net.layer.kv_cache]
    out = delta_net([1], [7], [4], torch.cat([mine[6:], tokens_of(3, 7)]), padded=3)
    torch.testing.assert_close(out[:1], whole[6:], atol=1e-5, rtol=1e-4)
    assert (out[1:] == 0).all()
    for pool, old in zip(delta_net.layer.kv_cache, before):
        others = [slot for slot in range(6) if slot != 4]
        torch.testing.assert_close(pool[others], old[others], equal_nan=True, atol=0, rtol=0)


@needs_vllm
def test_tokens_behind_the_batch_are_left_alone(delta_net):
    mine = tokens_of(9, 8)
    alone = delta_net([4], [4], [1], mine[:4])
    out = delta_net([4], [4], [2], mine)
    torch.testing.assert_close(out[:4], alone)
    assert (out[4:] == 0).all()


@needs_vllm
def test_a_prompt_of_one_token_starts_from_nothing(delta_net):
    mine = tokens_of(2, 9)
    whole = delta_net([2], [2], [2], mine)  # with its first token as a prefill
    delta_net([5], [5], [4], tokens_of(5, 10))  # a sequence that ends, and leaves its slot
    other = delta_net([5], [5], [3], tokens_of(5, 11))
    assert other.isfinite().all()
    kept = [pool[3].clone() for pool in delta_net.layer.kv_cache]
    tables = torch.tensor([[3, 77], [4, 77]], dtype=torch.int32)
    delta_net.builder.build(0, batch([1, 1], [6, 1], tables, padded=1))
    for pool, before in zip(delta_net.layer.kv_cache, kept):
        assert (pool[4] == 0).all()
        assert torch.equal(pool[3], before)
    first = delta_net([1], [1], [4], mine[:1])
    torch.testing.assert_close(torch.cat([first, delta_net([1], [2], [4], mine[1:])]), whole, atol=1e-5, rtol=1e-4)


@needs_vllm
@pytest.mark.parametrize(
    ("new", "second"),
    [([1, 1, 1], 2), ([1, 1, 1], 1), ([1, 1, 4], 1), ([3, 2, 5], 2)],
    ids=["decodes", "first", "mixed", "prefills"],
)
def test_another_group_of_layers_has_the_batch_with_its_own_slots(delta_net, new, second):
    tables = [torch.tensor([[slot, 77] for slot in slots], dtype=torch.int32) for slots in ((1, 2, 3), (5, 3, 4))]
    padded, is_first = 2 if second == 2 and max(new) == 1 else 0, second == 1  # the second sequence's length
    common, others = (batch(new, [9, second, 8], table, padded) for table in tables)
    mine, other = copy.copy(delta_net.builder), delta_net.builder
    mine.non_spec_state_indices_tensor = torch.full((8,), 99, dtype=torch.int32)
    pools = delta_net.layer.kv_cache
    pools[1].fill_(5)
    shared = other.build(0, common)
    assert [(pools[1][slot] == 0).all().item() for slot in range(6)] == [False, False, is_first, *[False] * 3]
    seen = mine.update_block_table(shared, others.block_table_tensor, others.slot_mapping)
    assert [(pools[1][slot] == 0).all().item() for slot in (3, 4, 5)] == [is_first, False, False]
    own = other.build(0, others)
    for name, value in vars(own).items():
        if torch.is_tensor(value):
            assert torch.equal(getattr(seen, name), value), name
        elif name not in ("nums_dict", "first_tokens"):
            assert getattr(seen, name) == value, name
    if padded:  # where a graph reads it
        assert seen.non_spec_state_indices_tensor.data_ptr() == mine.non_spec_state_indices_tensor.data_ptr()


@needs_vllm
@pytest.mark.parametrize("padded", [0, 2])
def test_a_batch_of_decodes_is_prepared_as_vllm_does(delta_net, seams, padded):
    common = batch([1, 1, 1], [9, 5, 8], torch.tensor([[1, 7], [2, 7], [3, 7]], dtype=torch.int32), padded)
    builder, other = delta_net.builder, copy.copy(delta_net.builder)
    other.non_spec_state_indices_tensor = torch.full((8,), 99, dtype=torch.int32)
    ours, theirs = builder.build(0, common), seams.gdn.GDNAttentionMetadataBuilder.build(other, 0, common)
    for name in (name for name in vars(theirs) if name.startswith("num_") and name != "num_accepted_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    slots = ours.non_spec_state_indices_tensor
    assert slots.tolist() == theirs.non_spec_state_indices_tensor.tolist() == [1, 2, 3, *[0] * padded]
    assert slots.data_ptr() == builder.non_spec_state_indices_tensor.data_ptr()  # where a graph reads them


@needs_vllm
def test_without_metadata_nothing_runs(delta_net, seams, monkeypatch):
    monkeypatch.setattr(seams.gdn.QwenGatedDeltaNetAttention, "_warmup_prefill_kernels", None)
    delta_net.context.attn_metadata = None
    delta_net.layer._forward_core(tokens_of(3, 9)[:, :128], None, None, None)


@needs_vllm
@pytest.mark.parametrize(
    ("asked", "active", "served"),
    [("auto", "flashinfer", "triton"), ("flashinfer", "flashinfer", "flashinfer"), ("triton", "triton", "triton")],
)
def test_vllm_chooses_no_prefill_kernel_that_compiles_for_minutes_by_itself(seams, monkeypatch, asked, active, served):
    monkeypatch.setattr(seams.gdn, "_resolve", lambda config: (asked, active))
    assert seams.gdn.prefill_backend(None) == (asked, served)


@needs_vllm
def test_slots_are_dense_even_for_one_sequence(seams):
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    for count in (1, 3):
        metadata = SimpleNamespace(non_spec_state_indices_tensor=table[:count, 0])
        slots = seams.gdn.dense_slots(metadata)
        assert slots.stride() == (1,)
        assert torch.equal(slots, table[:count, 0])
        assert seams.gdn.dense_slots(metadata) is slots


@needs_vllm
@pytest.mark.parametrize(
    ("changed", "words"),
    [({"num_spec": 2}, "speculative decoding is on"), ({"states": torch.float16}, "its states are torch.float16")],
)
def test_a_refused_layer_goes_to_vllm(seams, monkeypatch, changed, words):
    layer = object.__new__(seams.gdn.ShimGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    states = changed.get("states", torch.float32)
    layer.prefix, layer.num_spec = "layer", changed.get("num_spec", 0)
    layer.get_state_dtype = lambda: (torch.bfloat16, states)
    layer.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with using(Policy("strict")), pytest.raises(HookError, match=words):
        layer.serve_or_miss()
    stock = seams.gdn.QwenGatedDeltaNetAttention
    monkeypatch.setattr(stock, "_forward_core", lambda self, *given: given)
    with using(Policy("auto")):
        layer.serve_or_miss()
        assert layer._forward_core(1, 2, 3, 4) == (1, 2, 3, 4)


@needs_vllm
def test_the_bias_is_kept_in_float32_and_loads_as_before(seams, reference):
    layer = object.__new__(seams.gdn.ShimGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.prefix, layer.num_spec = "layer", 0
    layer.get_state_dtype = lambda: (torch.bfloat16, torch.bfloat16)
    layer.model_config = SimpleNamespace(dtype=torch.bfloat16)
    layer.dt_bias = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    layer.dt_bias.weight_loader = loader = object()
    layer.serve_or_miss()
    assert dict(layer.named_parameters())["dt_bias"].dtype is torch.float32
    assert layer.dt_bias.weight_loader is loader


# ---- attention ------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16


def caches(layout, pages=8):
    """A cache full of NaN as vLLM 0.24 or 0.32 lays it out, its pages padded."""
    content = 2 * BLOCK * KV_HEADS * SIZE
    pool = torch.full((pages, content + 64), torch.nan)[:, :content]
    if layout == "0.24":
        return pool.unflatten(1, (2, BLOCK, KV_HEADS, SIZE))
    return pool.unflatten(1, (BLOCK, KV_HEADS, 2 * SIZE)).transpose(1, 2)  # [NB,HK,BS,2D], tokens outermost in memory


@needs_vllm
@pytest.mark.parametrize("layout", ["0.24", "0.32"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("new", [[1, 1, 20], [3, 17, 30], [1, 1, 1]], ids=["mixed", "prefills", "decodes"])
def test_a_batch_attends_as_each_sequence_alone(seams, reference, layout, window, new):
    generator = torch.Generator().manual_seed(2)
    impl = seams.attention.ShimAttention(HEADS, SIZE, 0.125, KV_HEADS, None, window, "auto", None, "decoder", None)
    cache, lengths = caches(layout), [5, 17, 30]
    tables = torch.tensor([[3, 0], [1, 6], [7, 2]], dtype=torch.int32)
    keys, values = ([torch.randn(n, KV_HEADS, SIZE, generator=generator) for n in lengths] for _ in range(2))
    slots = [torch.tensor([int(t[j // BLOCK]) * BLOCK + j % BLOCK for j in range(n)]) for t, n in zip(tables, lengths)]
    padding = torch.full((3, KV_HEADS, SIZE), torch.nan)
    padded = [torch.cat([*tensors, padding]) for tensors in (keys, values)]
    impl.do_kv_cache_update(None, *padded, cache, torch.cat([*slots, torch.tensor([-1])]))

    graph = 2 if max(new) == 1 else 0
    builder = object.__new__(seams.attention.ShimAttentionMetadataBuilder)
    metadata = builder.build(0, batch(new, lengths, tables, padded=graph))
    query = torch.randn(sum(new) + 2, HEADS, SIZE, generator=generator)
    output = impl.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    assert (output[sum(new) : sum(new) + graph] == 0).all()
    for q, k, v, n in zip(query.split([*new, 2]), keys, values, new):
        mask = torch.ones(n, len(k)).tril(len(k) - n)
        mask = (mask.triu(len(k) - n - window + 1) if window else mask).bool()
        alone = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale=0.125, enable_gqa=True
        )
        torch.testing.assert_close(output[:n], alone.transpose(0, 1), atol=1e-5, rtol=1e-4)
        output = output[n:]


@needs_vllm
def test_another_group_of_layers_shares_the_metadata_but_its_blocks(seams):
    builder = object.__new__(seams.attention.ShimAttentionMetadataBuilder)
    first = builder.build(0, batch([1, 4], [9, 4], torch.ones(2, 1, dtype=torch.int32)))
    other = builder.update_block_table(first, "table", "slots")
    assert (other.block_table, other.slot_mapping, other.num_decodes) == ("table", "slots", 1)
    assert torch.is_tensor(first.block_table)
    assert builder.get_cudagraph_support(None, None).name == "UNIFORM_SINGLE_TOKEN_DECODE"


@needs_vllm
def test_a_batch_that_is_not_causal_or_an_unknown_cache_is_an_error(seams):
    builder = object.__new__(seams.attention.ShimAttentionMetadataBuilder)
    common = batch([1], [1], torch.ones(1, 1, dtype=torch.int32)).replace(causal=False)
    with pytest.raises(HookError, match="is causal, this batch is not"):
        builder.build(0, common)
    with pytest.raises(HookError, match=r"cache of shape \[3, 8, 16, 2, 64\]"):
        seams.attention.split_cache(torch.empty(3, 8, 16, 2, 64), 64)


@pytest.fixture
def selection(seams, monkeypatch):
    """(needs of a layer, what the user selected) -> why it is refused."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    parallel = SimpleNamespace(decode_context_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, model_config=None, cache_config=None)
    monkeypatch.setattr(seams.attention, "get_current_vllm_config", lambda: config)

    def refused(selected=None, **needs):
        usual = {"head_size": 256, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
        needed = AttentionSelectorConfig(**(usual | needs))
        return seams.attention.refusal(selected, needed, DeviceCapability(9, 0))

    refused.parallel = parallel
    return refused


@needs_vllm
def test_layers_that_the_ops_do_not_fit_are_refused_with_the_reason(selection):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert selection() is selection(AttentionBackendEnum.FLASH_ATTN) is None
    assert selection(dtype=torch.float16, kv_cache_dtype="float16", head_size=64, block_size=544) is None
    assert selection(dtype=torch.float32) is None
    for needs, words in [
        ({"selected": AttentionBackendEnum.TRITON_ATTN}, "--attention-backend TRITON_ATTN was asked for"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "a float16 cache under activations in torch.bfloat16"),
        ({"head_size": 512}, "head_size not supported"),
        ({"block_size": 24}, "block_size not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "full attention not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
    ]:
        assert words in selection(**needs)
    selection.parallel.decode_context_parallel_size = 2
    assert selection() == "decode context parallelism is on"


@needs_vllm
def test_the_platform_is_asked_for_our_backend_first(seams, monkeypatch):
    class Platform:
        @classmethod
        def get_device_capability(cls):
            return None

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            return f"stock {selected_backend} {attn_selector_config} {num_heads}"

    monkeypatch.setattr(seams.attention, "current_platform", Platform())
    monkeypatch.setattr(seams.attention, "refusal", lambda selected, config, capability: config)
    seams.attention.install()
    path = Platform.get_attn_backend_cls(None, attn_selector_config=None, num_heads=2)
    assert path == "shim.vllm_plugin.attention_cuda.ShimAttentionBackend"
    with using(Policy("auto")):
        assert Platform.get_attn_backend_cls("X", attn_selector_config="sinks", num_heads=2) == "stock X sinks 2"
    with using(Policy("strict")), pytest.raises(HookError, match="attention layers, not opshim: sinks"):
        Platform.get_attn_backend_cls("X", attn_selector_config="sinks")
