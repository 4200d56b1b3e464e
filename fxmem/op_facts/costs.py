"""What ops take beside the bytes that are observed: arithmetic, time, scratch."""

from __future__ import annotations

from fxmem.op_facts.kinds import Elementwise, Flops, OpFact, TimeDependsOnValues

FACTS: tuple[OpFact, ...] = (
    OpFact(
        ops=("aten._grouped_mm", "aten._scaled_grouped_mm"),
        value=Flops("grouped_matmul_flops"),
        why="FLOPs are counted by torch's formulas, and torch has none for the matmuls of mixtures of experts",
        test="test_groups_of_equal_size_end_where_the_last_one_ends_with_all",
    ),
    OpFact(
        ops=("aten._grouped_mm", "aten._scaled_grouped_mm", "torch._grouped_mm", "torch._scaled_grouped_mm"),
        value=TimeDependsOnValues("group ends"),
        why="an argument says where groups end; made-up zeros would make all of them empty",
        test="test_a_grouped_matmul_is_measured_with_groups_that_hold_all_rows",
    ),
    OpFact(
        ops=("aten.hardswish.default", "aten.hardswish_.default"),
        value=Elementwise(),
        why="the dispatcher says which ops are pointwise, by a tag that nobody has given this one",
        test="test_ops_the_dispatcher_calls_pointwise_make_the_same_bits_without_autograd",
    ),
    OpFact(
        ops=("fxmem.masked_dropout",),
        value=Elementwise(),
        why="a function of fxmem has no tags",
        test="test_dropout_gives_the_same_bits",
    ),
    OpFact(
        ops=(
            "fxmem.add_",
            "fxmem.sub_",
            "fxmem.relu_",
            "fxmem.leaky_relu_",
            "fxmem.sigmoid_",
            "fxmem.tanh_",
            "fxmem.hardtanh_",
            "fxmem.hardtanh_in_place",
            "fxmem.relu6_",
            "fxmem.relu6_in_place",
        ),
        value=Elementwise(),
        why="a function of fxmem has no tags",
        test="test_forms_written_over_their_input_make_the_same_bits_without_autograd",
    ),
)
