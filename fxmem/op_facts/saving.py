"""What ops save for the backward that it does not need, and the functions of fxmem that save less."""

from __future__ import annotations

from fxmem.op_facts.kinds import CompressedForm, InPlaceForm, LeanBackward, OpFact, PartOf, SavesUnseen, UnreadInput

_UNREAD = "a saved tensor is observed, but not whether the backward's kernel reads its values"
_UNREAD_TEST = "test_what_backward_does_not_read_is_not_saved"
_IN_PLACE = "that a backward makes the same bits from the result as from the input follows from its formula"
_IN_PLACE_TEST = "test_gradients_of_what_is_written_over_a_view_keep_their_layout"
_CLIPPED_TEST = "test_clipping_that_reads_its_result_in_the_backward_gives_the_same_bits"
_SIGN = "a saved result is observed, but not that the backward's kernel reads its sign alone"
_SIGN_TEST = "test_a_relu_saves_a_bit_an_element"


def _unread(op: str) -> OpFact:
    """An op whose backward takes the input after the gradient, then the op's other arguments."""
    value = CompressedForm("input_unread", backward=f"{op}_backward.default")
    return OpFact((f"{op}.default",), value, _UNREAD, _UNREAD_TEST)


def _max_pool(op: str) -> OpFact:
    """A max pooling that returns its indices too."""
    value = CompressedForm("max_pool_input_unread", backward=f"{op}_backward.default")
    return OpFact((f"{op}.default",), value, _UNREAD, _UNREAD_TEST)


FACTS: tuple[OpFact, ...] = (
    OpFact(
        ops=("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"),
        value=SavesUnseen(),
        why="what cuDNN saves is not seen on fakes, and its dropout has a state that no re-run can restore",
        test="test_recurrent_layers_are_refused_where_cudnn_runs_them",
        device="cuda",
    ),
    # Inputs that no backward reads: of ops as captured, then of the ops that they consist of, with the form for these.
    OpFact(
        ops=(
            *("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"),
            *("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding"),
            *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
        ),
        value=UnreadInput(if_others_frozen=True),
        why=_UNREAD,
        test=_UNREAD_TEST,
    ),
    OpFact(
        ops=(
            *("aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default"),
            *("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default"),
            *("aten.adaptive_avg_pool3d.default", "aten.pad.default"),
        ),
        value=UnreadInput(),
        why=_UNREAD,
        test=_UNREAD_TEST,
    ),
    OpFact(
        ops=("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default"),
        value=UnreadInput(saves_indices=True),
        why=_UNREAD,
        test=_UNREAD_TEST,
    ),
    _unread("aten.avg_pool2d"),
    _unread("aten.avg_pool3d"),
    _unread("aten._adaptive_avg_pool2d"),
    _unread("aten._adaptive_avg_pool3d"),
    _unread("aten.reflection_pad1d"),
    _unread("aten.reflection_pad2d"),
    _unread("aten.reflection_pad3d"),
    _unread("aten.replication_pad1d"),
    _unread("aten.replication_pad2d"),
    _unread("aten.replication_pad3d"),
    OpFact(("aten.convolution.default",), CompressedForm("frozen_convolution"), _UNREAD, _UNREAD_TEST),
    OpFact(
        ops=("aten.batch_norm.default",),
        value=CompressedForm("frozen_batch_norm"),
        why="the gradient of a frozen one does not depend on the input, which autograd saves all the same",
        test="test_frozen_batch_norms_save_nothing_of_their_inputs_size",
    ),
    _max_pool("aten.max_pool2d_with_indices"),  # in one dimension it runs as one in two
    _max_pool("aten.max_pool3d_with_indices"),
    # What dropouts and attentions consist of on the CPU.
    OpFact(
        ops=("aten.mul.Tensor",),
        value=CompressedForm(
            "masked_dropout",
            preceded_by=(("aten.div_.Scalar", 1), ("aten.bernoulli_.float", 0), ("aten.empty_like.default", 0)),
        ),
        why="that a mask holds but two values is not seen in its dtype, the input's own",
        test="test_dropout_gives_the_same_bits",
        device="cpu",
    ),
    OpFact(
        ops=("aten._safe_softmax.default",),
        value=CompressedForm("safe_softmax"),
        why="that it goes over the scores three times more than a softmax does is inside its kernel",
        test="test_a_safe_softmax_has_the_bits_and_the_layout_of_eagers",
    ),
    OpFact(
        ops=("aten.bmm.default",),
        value=PartOf(
            whole="aten.matmul.default",
            through=("aten.clone.default", "aten.view.default", "aten._unsafe_view.default"),
            start="aten.expand.default",
        ),
        why="a trace shows the ops that a matmul consists of, not that one call in C++ runs them",
        test="test_an_attention_multiplies_as_eager_does",
    ),
    # Backwards that hold less at once.
    OpFact(
        ops=(
            *("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"),
            *("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding"),
            *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
            "aten.convolution.default",
        ),
        value=LeanBackward("split_convolution"),
        why="which of its kernels read the input is inside the backward, one op",
        test="test_a_convolution_lets_go_of_its_input_within_its_backward",
    ),
    OpFact(
        ops=("aten.max_pool2d.default",),
        value=LeanBackward("relu_max_pool", of="aten.max_pool2d_with_indices.default"),
        why="that a maximum of a ReLU's results is zero where they all are is what these ops mean",
        test="test_a_relu_before_a_max_pooling_saves_nothing_of_its_own",
    ),
    OpFact(("aten.relu.default",), LeanBackward("relu_of_bits"), _SIGN, _SIGN_TEST),
    OpFact(("aten.relu_.default",), LeanBackward("relu_of_bits_in_place"), _SIGN, _SIGN_TEST),
    OpFact(("fxmem.relu_",), LeanBackward("relu_of_bits_"), _SIGN, _SIGN_TEST),
    # Results that may be written over the input.
    OpFact(("aten.add.Tensor",), InPlaceForm("add_"), _IN_PLACE, _IN_PLACE_TEST),
    OpFact(("aten.sub.Tensor",), InPlaceForm("sub_"), _IN_PLACE, _IN_PLACE_TEST),
    OpFact(("aten.relu.default",), InPlaceForm("relu_"), _IN_PLACE, _IN_PLACE_TEST),
    OpFact(("aten.leaky_relu.default",), InPlaceForm("leaky_relu_"), _IN_PLACE, _IN_PLACE_TEST),
    OpFact(("aten.sigmoid.default",), InPlaceForm("sigmoid_"), _IN_PLACE, _IN_PLACE_TEST),
    OpFact(("aten.tanh.default",), InPlaceForm("tanh_"), _IN_PLACE, _IN_PLACE_TEST),
    OpFact(("aten.relu6.default",), InPlaceForm("relu6_", saves_result=True), _IN_PLACE, _CLIPPED_TEST),
    OpFact(("aten.relu6_.default",), InPlaceForm("relu6_in_place", saves_result=True), _IN_PLACE, _CLIPPED_TEST),
    OpFact(("aten.hardtanh.default",), InPlaceForm("hardtanh_", saves_result=True), _IN_PLACE, _CLIPPED_TEST),
    OpFact(("aten.hardtanh_.default",), InPlaceForm("hardtanh_in_place", saves_result=True), _IN_PLACE, _CLIPPED_TEST),
)
