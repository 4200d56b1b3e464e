"""Ops whose fake kernels return something else than the real ones; :mod:`fxmem.fake.meta_fixups` corrects them."""

from __future__ import annotations

from fxmem.op_facts.kinds import FakeOfSparse, FakeResult, MissingFake, OnlyWrites, OpFact, OwnKernelOnCuda

_ATTENTION = "test_fakes_dispatch_what_torch_did_forward_and_backward"
_CORRECTED = "test_corrected_fakes_are_as_real_tensors"

FACTS: tuple[OpFact, ...] = (
    OpFact(
        ops=("aten.view.default", "aten._unsafe_view.default"),
        value=FakeResult("viewed"),
        why="the fake of a view is made by code of its own, which gives dimensions of one element other strides",
        test="test_views_with_dimensions_of_one_element",
    ),
    OpFact(
        ops=("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor"),
        value=FakeResult("computed"),
        why="fakes lay out dimensions of one element, and expanded ones of low precision, otherwise than kernels do",
        test="test_ops_on_two_operands_with_expanded_dimensions_and_of_one_element",
    ),
    OpFact(
        ops=("aten.native_batch_norm.default",),
        value=FakeResult("batch_normed"),
        why="the CPU's kernel chooses the layout of its result, and the dtype of its statistics, by rules of its own",
        test="test_norms_and_their_gradients",
        device="cpu",
    ),
    OpFact(
        ops=("aten.native_group_norm.default",),
        value=FakeResult("group_normed"),
        why="the CPU's kernel chooses the layout of its result, and the dtype of its statistics, by rules of its own",
        test="test_norms_and_their_gradients",
        device="cpu",
    ),
    OpFact(
        ops=("aten.native_layer_norm.default",),
        value=FakeResult("layer_normed"),
        why="the real result is contiguous whatever the input is; the CPU keeps statistics in a dtype of its own",
        test="test_norms_and_their_gradients",
    ),
    OpFact(
        ops=("aten.native_batch_norm_backward.default",),
        value=FakeResult("batch_norm_backward"),
        why="the CPU's kernel lays the gradient out as the input is, and makes none where none is asked for",
        test="test_norms_and_their_gradients",
        device="cpu",
    ),
    OpFact(
        ops=("aten.native_group_norm_backward.default",),
        value=FakeResult("group_norm_backward"),
        why="the CPU's kernel lays the gradient out as the input is, in the input's dtype",
        test="test_norms_and_their_gradients",
        device="cpu",
    ),
    OpFact(
        ops=("aten.native_layer_norm_backward.default",),
        value=FakeResult("layer_norm_backward"),
        why="the real gradient is contiguous whatever the input is",
        test="test_norms_and_their_gradients",
    ),
    OpFact(
        ops=("aten.convolution.default",),
        value=FakeResult("convolution"),
        why="a transposed one in three dimensions makes a result as large as its input, then resizes it: its storage "
        "stays as large",
        test="test_transposed_convolutions_that_make_less_than_they_take",
        device="cpu",
    ),
    OpFact(
        ops=("aten.convolution_backward.default",),
        value=FakeResult("convolution_backward"),
        why="oneDNN makes the weight's gradient beside the bias's, wanted or not; cuDNN lays gradients out with channels "
        "last if the input or the weight is so",
        test="test_transposed_convolutions_of_which_the_bias_learns",
    ),
    OpFact(
        ops=(
            "aten.reflection_pad2d.default",
            "aten.replication_pad2d.default",
            "aten.reflection_pad3d.default",
            "aten.replication_pad3d.default",
        ),
        value=FakeResult("padded"),
        why="on the CPU channels are last in the result if they are in the input; of 2d ones until torch 2.11",
        test="test_paddings_and_their_gradients",
        device="cpu",
    ),
    OpFact(
        ops=(
            "aten.reflection_pad2d_backward.default",
            "aten.replication_pad2d_backward.default",
            "aten.reflection_pad3d_backward.default",
            "aten.replication_pad3d_backward.default",
        ),
        value=FakeResult("padding_backward"),
        why="on the CPU channels are last in the gradient if they are in the input",
        test="test_paddings_and_their_gradients",
        device="cpu",
    ),
    OpFact(
        ops=(
            "aten.binary_cross_entropy.default",
            "aten.soft_margin_loss.default",
            "aten.mse_loss.default",
            "aten.smooth_l1_loss.default",
        ),
        value=FakeResult("reduced_in_place"),
        why="the loss is reduced inside the buffer that held it for every element",
        test=_CORRECTED,
    ),
    OpFact(
        ops=(
            *("aten.copy.default", "aten.slice_scatter.default", "aten.select_scatter.default"),
            *("aten.diagonal_scatter.default", "aten.as_strided_scatter.default"),
        ),
        value=FakeResult("written_into_a_copy"),
        why="the kernel copies the whole storage that its first argument is a view of, not only what that shows",
        test=_CORRECTED,
    ),
    OpFact(
        ops=("aten.mkldnn_rnn_layer.default",),
        value=FakeResult("recurrent"),
        why="a recurrent layer of oneDNN has a workspace, whose size only a run of it tells",
        test=_CORRECTED,
    ),
    OpFact(
        ops=("aten.mkldnn_rnn_layer_backward.default",),
        value=FakeResult("recurrent_backward"),
        why="the fake gives one tensor as the gradient of both biases, the kernel two",
        test="test_recurrent_layers_are_predicted_to_the_byte",
    ),
    OpFact(
        ops=("aten._embedding_bag.default",),
        value=FakeResult("embedded_bags"),
        why="offsets and sizes that the CPU's kernel saves may have room for one element more",
        test=_CORRECTED,
        device="cpu",
    ),
    OpFact(
        ops=("aten._scaled_dot_product_cudnn_attention.default",),
        value=FakeResult("cudnn_attention"),
        why="without a gradient the kernel makes no logsumexp",
        test=_ATTENTION,
        device="cuda",
    ),
    OpFact(
        ops=("aten._scaled_dot_product_efficient_attention.default",),
        value=FakeResult("efficient_attention"),
        why="the seed and the offset of a dropout are numbers of the CPU's",
        test=_ATTENTION,
        device="cuda",
    ),
    OpFact(
        ops=(
            "aten.silu_backward.default",
            "aten.mish_backward.default",
            "aten._fused_rms_norm.default",
            "aten.native_channel_shuffle.default",
        ),
        value=OwnKernelOnCuda(),
        why="torch without CUDA has no kernel of CUDA's, and fakes there would run the ops it is put together from",
        test="test_ops_with_kernels_of_their_own_stay_whole",
    ),
    OpFact(
        ops=(
            *("aten._fused_sgd_.default", "aten._fused_sgd_.tensor_lr"),
            *("aten._fused_adagrad_.default", "aten._fused_adagrad_.tensor_lr"),
            *("aten._fused_adam_.tensor_lr", "aten._fused_adamw_.tensor_lr"),
        ),
        value=OnlyWrites(),
        why="torch has no kernel of it for fakes: the CPU's would run on tensors made for the purpose, CUDA's cannot",
        test="test_fused_optimizers_on_a_gpu_that_is_not_here",
    ),
    OpFact(
        ops=("aten._ctc_loss.default", "aten._ctc_loss.Tensor"),
        value=MissingFake("ctc_loss", bounds=True),
        why="the width of the table that it saves depends on the lengths of the targets",
        test="test_a_ctc_loss_is_planned",
    ),
    OpFact(
        ops=("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor"),
        value=MissingFake("ctc_loss_backward"),
        why="torch has a fake for neither half of the loss",
        test="test_a_ctc_loss_is_planned",
    ),
    OpFact(
        ops=("aten.clone.default",),
        value=FakeOfSparse("sparse_clone"),
        why="the fake kernel forgets the entries of a sparse gradient; how many merge depends on values, so none is "
        "taken to",
        test="test_sparse_gradients_count_by_the_entries_of_the_batch",
    ),
    OpFact(
        ops=("aten._coalesce.default",),
        value=FakeOfSparse("sparse_coalesce"),
        why="how many entries merge depends on values; none is taken to",
        test="test_sparse_gradients_count_by_the_entries_of_the_batch",
    ),
    OpFact(
        ops=("aten.sparse_mask.default",),
        value=FakeOfSparse("sparse_mask", place=1),
        why="the fake kernel forgets the entries of the mask",
        test="test_sparse_gradients_count_by_the_entries_of_the_batch",
    ),
    OpFact(
        ops=("aten.add.Tensor",),
        value=FakeOfSparse("sparse_add"),
        why="how many entries of a sum merge depends on values; none is taken to",
        test="test_sparse_gradients_of_a_table_that_is_read_twice",
    ),
    OpFact(
        ops=("aten.add_.Tensor",),
        value=FakeOfSparse("sparse_add_"),
        why="how many entries of a sum merge depends on values; none is taken to",
        test="test_sparse_gradients_count_by_the_entries_of_the_batch",
    ),
)
