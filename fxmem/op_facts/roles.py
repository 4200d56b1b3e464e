"""What ops are to those who look for patterns: chains of rows, samples of a batch, sums of gradients."""

from __future__ import annotations

from fxmem.op_facts.kinds import CompiledRole, FusedRole, OpFact, RecordedRole, RowRole, SampleRole

_ROWS = (
    "a run shows what is read and made, not which element is made of which; what an op does to rows is its definition"
)
_SAMPLES = "a run shows sizes, not which sample is made of which; along which dimensions an op goes is its definition"
_COMPILED = "a compiled graph is lowered, not run op by op; what Inductor makes of an op is in its lowering alone"
_FUSED = "that a kernel of Inductor's has eager's bits is shown by that kernel, which a run on fakes does not make"
_RECORDED = "one run is recorded; what another run of the op does on other values is its definition"

_PIECES, _APART = "test_heads_in_pieces_have_eagers_gradients", "test_samples_apart_are_let_pass"
_CONVOLUTIONS = "test_convolutions_in_pieces_have_eagers_gradients"
_MLPS, _MEET = "test_mlps_in_pieces_have_eagers_gradients", "test_samples_that_meet_are_found"
_PRICED = "test_what_is_computed_by_a_series_or_drawn_costs_more_than_what_moves_bytes_only"
_LOWERED = "test_the_wrapper_of_a_graph_is_code_that_runs_on_fakes_and_no_kernel_is_compiled"
_SUMMED = "test_gradients_of_a_residual_do_not_stay_until_the_backward_is_over"
_WRITTEN = "test_gradients_are_eagers_where_the_forward_writes_over_what_it_read"
_LAID_OUT = "test_copies_of_weights_to_channels_last_are_spared_where_memory_is_short"
_CHAINS = "test_each_op_of_a_chain_has_eagers_bits_in_a_kernel"
_PROGRAM = "test_steps_as_programs_have_eagers_bits_and_stay_within_the_plan"


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in names.split())


FACTS: tuple[OpFact, ...] = (
    OpFact(_aten("cross_entropy_loss.default"), RowRole("loss"), _ROWS, _PIECES),
    OpFact(_aten("linear.default addmm.default"), RowRole("linear"), _ROWS, _MLPS),
    OpFact(_aten("conv1d.default conv2d.default conv3d.default"), RowRole("convolution"), _ROWS, _CONVOLUTIONS),
    OpFact(_aten("to.dtype to.dtype_layout to.device _to_copy.default"), RowRole("cast"), _ROWS, _PIECES),
    OpFact(_aten("view.default reshape.default _unsafe_view.default"), RowRole("view to a size"), _ROWS, _PIECES),
    OpFact(_aten("flatten.using_ints"), RowRole("view"), _ROWS, _PIECES),
    OpFact(_aten("alias.default contiguous.default"), RowRole("same"), _ROWS, _MLPS),
    OpFact(_aten("chunk.default split.Tensor"), RowRole("parts"), _ROWS, _MLPS),
    OpFact(_aten("slice.Tensor"), RowRole("slice"), _ROWS, _PIECES),
    OpFact(_aten("_assert_tensor_metadata.default"), RowRole("check"), _ROWS, _PIECES),
    OpFact(
        _aten(
            "linear matmul mm addmm bmm baddbmm dropout to _to_copy alias contiguous clone detach permute transpose t "
            "unsqueeze squeeze movedim mean sum amax amin var std prod any all norm linalg_vector_norm "
            "bernoulli bernoulli_ zeros_like ones_like empty_like full_like"
        ),
        SampleRole("anywhere"),
        _SAMPLES,
        _APART,
    ),
    OpFact(
        _aten(
            "conv1d conv2d conv3d conv_transpose1d conv_transpose2d max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
            "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d group_norm pixel_shuffle "
            "upsample_nearest2d upsample_bilinear2d feature_dropout channel_shuffle"
        ),
        SampleRole("first"),
        _SAMPLES,
        _APART,
    ),
    OpFact(_aten("expand expand_as"), SampleRole("expanded"), _SAMPLES, _APART),
    OpFact(_aten("batch_norm"), SampleRole("batch norm"), _SAMPLES, _MEET),
    OpFact(_aten("instance_norm"), SampleRole("instance norm"), _SAMPLES, _MEET),
    OpFact(
        _aten(
            "softmax log_softmax cumsum diff sort topk flip roll argmax argmin gather scatter index_select glu split chunk "
            "split_with_sizes unbind select narrow cat"
        ),
        SampleRole("along"),
        _SAMPLES,
        _MEET,
    ),
    OpFact(_aten("slice"), SampleRole("slice"), _SAMPLES, _MEET),
    OpFact(_aten("stack"), SampleRole("stack"), _SAMPLES, _MEET),
    OpFact(_aten("view reshape _unsafe_view flatten unflatten"), SampleRole("view"), _SAMPLES, _APART),
    OpFact(_aten("layer_norm rms_norm"), SampleRole("norm"), _SAMPLES, _APART),
    OpFact(_aten("embedding"), SampleRole("embedding"), _SAMPLES, _APART),
    OpFact(_aten("pad"), SampleRole("pad"), _SAMPLES, _APART),
    OpFact(_aten("scaled_dot_product_attention"), SampleRole("attention"), _SAMPLES, _APART),
    OpFact(_aten("new_empty new_zeros new_ones new_full"), SampleRole("new"), _SAMPLES, _APART),
    OpFact(_aten("empty zeros ones full rand randn"), SampleRole("made"), _SAMPLES, _APART),
    OpFact(_aten("_assert_tensor_metadata sym_size _assert_scalar"), SampleRole("check"), _SAMPLES, _APART),
    OpFact(
        (
            *_aten(
                "full where _to_copy full_like scalar_tensor expand index _unsafe_index constant_pad_nd cat "
                "embedding gather slice_scatter select_scatter copy avg_pool2d avg_pool2d_backward"
            ),
            *("prims.iota", "prims.convert_element_type", "prims.broadcast_in_dim"),
        ),
        CompiledRole("pointwise"),
        _COMPILED,
        _LOWERED,
    ),
    OpFact(
        _aten("sum amax amin mean var var_mean any cumsum scatter scatter_add scatter_reduce index_put"),
        CompiledRole("reduction"),
        _COMPILED,
        _LOWERED,
    ),
    OpFact(
        _aten("exp exp2 expm1 log log2 log1p tanh erf erfc sigmoid sin cos"), CompiledRole("series"), _COMPILED, _PRICED
    ),
    OpFact(_aten("max_pool2d_with_indices max_pool3d_with_indices"), CompiledRole("maximum"), _COMPILED, _PRICED),
    OpFact(_aten("mm.default"), CompiledRole("product"), _COMPILED, _SUMMED),
    OpFact(_aten("add.Tensor"), CompiledRole("sum"), _COMPILED, _SUMMED),
    OpFact(_aten("copy_.default"), CompiledRole("copy"), _COMPILED, _LOWERED),
    OpFact(_aten("clone.default"), CompiledRole("kept"), _COMPILED, _WRITTEN),
    OpFact(_aten("convolution.default convolution_backward.default"), CompiledRole("laid out"), _COMPILED, _LAID_OUT),
    OpFact(_aten("reshape.default _unsafe_view.default"), CompiledRole("view"), _COMPILED, _LOWERED),
    OpFact(
        ("higher_order.invoke_subgraph",), CompiledRole("region"), _COMPILED, "test_regions_compiled_once_are_refused"
    ),
    OpFact(
        _aten("index index_put index_put_ _index_put_impl_ _unsafe_index"),
        RecordedRole("indexing"),
        _RECORDED,
        _PROGRAM,
    ),
    OpFact(_aten("set_ resize_ resize_as_"), RecordedRole("moving"), _RECORDED, _PROGRAM),
    OpFact(_aten("_to_copy"), RecordedRole("cast"), _RECORDED, _PROGRAM),
    OpFact(_aten("add.Tensor"), RecordedRole("sum"), _RECORDED, _PROGRAM),
    OpFact(_aten("add_.Tensor"), RecordedRole("sum in place"), _RECORDED, _PROGRAM),
    OpFact(
        _aten(
            "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default "
            "where.self relu.default threshold_backward.default sigmoid.default silu.default hardswish.default "
            "leaky_relu.default rsqrt.default"
        ),
        FusedRole("elementwise"),
        _FUSED,
        _CHAINS,
    ),
)
