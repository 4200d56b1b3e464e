"""What ops write, read and decide."""

from __future__ import annotations

from fxmem.op_facts.kinds import (
    AddedByExport,
    ByIndices,
    GradientsByMask,
    InPlaceInBackward,
    InPlaceInLinear,
    MadeFirst,
    MakesConstant,
    NeverRecompute,
    OpFact,
    QueryOnly,
    ReadsScalar,
    RoutingDecision,
    TagsRandom,
    TakesStorageOffset,
    UpdatesOnly,
    WritesUnsaid,
)

_VALUES = "a fake tensor has no values: which way a model goes by one shows only where the read is intercepted"

_SELECTING = ("Max", "Min", "Sort", "Topk", "Median", "Nanmedian", "Kthvalue", "Mode")
_ORDER = "fakes come in the order in which they are returned; which free block each finds is up to the kernel's order"
_SUBCLASS = "where a mode is on, or a tensor is a fake, the formula takes a variant that writes a new tensor"

FACTS: tuple[OpFact, ...] = (
    OpFact(
        ops=("aten.index_put.default",),
        value=InPlaceInBackward(("IndexBackward0",)),
        why=_SUBCLASS,
        test="test_gradients_that_autograd_writes_in_place",
    ),
    OpFact(
        ops=("aten.scatter_add.default",),
        value=InPlaceInBackward(("GatherBackward0", "CummaxBackward0", "CumminBackward0")),
        why=_SUBCLASS,
        test="test_gradients_that_autograd_writes_in_place",
    ),
    OpFact(
        ops=("aten.put.default",),
        value=InPlaceInBackward(("TakeBackward0",)),
        why=_SUBCLASS,
        test="test_gradients_that_autograd_writes_in_place",
    ),
    OpFact(
        ops=("aten.sub.Tensor", "aten.mul.Tensor"),
        value=InPlaceInBackward(("BinaryCrossEntropyWithLogitsBackward0",)),
        why=_SUBCLASS,
        test="test_gradients_that_autograd_writes_in_place",
    ),
    OpFact(
        ops=("aten.add.Tensor",),
        value=InPlaceInLinear(
            ("aten.mm.default", "aten.bmm.default", "aten.view.default", "aten._unsafe_view.default")
        ),
        why=_SUBCLASS,
        test="test_the_bias_of_a_linear_layer_is_added_in_place",
    ),
    OpFact(
        ops=("aten.index_add.default",),
        value=InPlaceInBackward(("IndexSelectBackward0",)),
        why=_SUBCLASS,
        test="test_gradients_that_autograd_writes_in_place",
    ),
    OpFact(
        ops=("aten.scatter.src",),
        value=InPlaceInBackward(
            tuple(f"{name}Backward0" for name in _SELECTING) + tuple(f"{name}Backward1" for name in _SELECTING)
        ),
        why=_SUBCLASS,
        test="test_gradients_that_autograd_writes_in_place",
    ),
    OpFact(
        ops=("aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.miopen_batch_norm.default"),
        value=WritesUnsaid(places=(3, 4), flag=5),
        why="the kernel updates running mean and variance, which its schema does not say; no version counter rises",
        test="test_running_statistics_are_written_though_nothing_says_so",
    ),
    OpFact(
        ops=("aten.batch_norm_gather_stats.default", "aten.batch_norm_gather_stats_with_counts.default"),
        value=WritesUnsaid(places=(3, 4)),
        why="SyncBatchNorm's kernel updates running mean and variance, which its schema does not say",
        test="test_schemas_do_not_say_what_is_written",
        device="cuda",
    ),
    OpFact(
        ops=("aten.batch_norm_update_stats.default",),
        value=WritesUnsaid(places=(1, 2)),
        why="the kernel updates running mean and variance, which its schema does not say; no version counter rises",
        test="test_running_statistics_are_written_though_nothing_says_so",
    ),
    OpFact(
        ops=("aten.batch_norm.default", "aten.instance_norm.default", "fxmem.frozen_batch_norm"),
        value=UpdatesOnly(places=(3, 4), flag=5),
        why="a write is observed, but not that the result is computed from the batch alone",
        test="test_running_statistics_of_another_dtype_choose_the_kernel",
    ),
    OpFact(
        ops=("c10d.*", "_c10d_functional.*"),
        value=NeverRecompute("runs a collective"),
        why="other processes take part in it, and would have to run it again at the same time",
        test="test_collectives_are_never_recomputed",
    ),
    OpFact(
        ops=(
            *(
                "aten.*",
                "prim.*",
                "prims.*",
                "rngprims.*",
                "inductor.*",
                "inductor_prims.*",
                "sparse.*",
                "torchvision.*",
            ),
            *("mkl.*", "mkldnn.*", "mkldnn_prepacked.*", "onednn.*", "quantized.*", "_quantized.*", "quantization.*"),
            *(
                "c10d.*",
                "_c10d_functional.*",
                "_c10d_functional_autograd.*",
                "_dtensor.*",
                "symm_mem.*",
                "fsdp.*",
                "profiler.*",
            ),
        ),
        value=TagsRandom(),
        why="a custom op is opaque, seldom has the tag of what draws random numbers, and its fake draws nothing",
        test="test_a_custom_op_draws_the_same_when_it_runs_again",
    ),
    OpFact(
        ops=(
            "aten.topk",
            "aten.sort",
            "aten.argsort",
            "aten.argmax",
            "aten.argmin",
            "aten.multinomial",
            "aten.bucketize",
            "aten.searchsorted",
        ),
        value=RoutingDecision(),
        why="what its integers are used for is the model's; a decision made twice must be the same both times",
        test="test_routing_decisions_are_saved_by_default",
    ),
    OpFact(
        ops=("torch.Tensor.__bool__",),
        value=ReadsScalar("branch"),
        why=_VALUES,
        test="test_each_way_is_eagers",
    ),
    OpFact(
        ops=("torch.Tensor.tolist", "torch.Tensor.__int__", "torch.Tensor.__index__"),
        value=ReadsScalar("number"),
        why=_VALUES,
        test="test_a_model_that_goes_many_ways_is_warned_of",
    ),
    OpFact(
        ops=("torch.Tensor.item", "torch.Tensor.__float__"),
        value=ReadsScalar("number", stand_in=True),
        why=_VALUES,
        test="test_scalars_of_fakes_read_as_one",
    ),
    OpFact(
        ops=("aten.index.Tensor",),
        value=ByIndices(writes=False),
        why=_VALUES,
        test="test_a_forward_on_fakes_reads_what_was_noted_and_makes_tensors_of_the_same_sizes",
    ),
    OpFact(
        ops=("aten.index_put.default", "aten.index_put_.default"),
        value=ByIndices(writes=True),
        why=_VALUES,
        test="test_a_forward_on_fakes_reads_what_was_noted_and_makes_tensors_of_the_same_sizes",
    ),
    OpFact(
        ops=("aten.item.default",),
        value=ReadsScalar("op"),
        why=_VALUES,
        test="test_what_a_graph_would_lose_is_refused_by_name_and_leaves_no_trace",
    ),
    OpFact(
        ops=("aten._local_scalar_dense.default",),
        value=ReadsScalar("op", stand_in=True),
        why=_VALUES,
        test="test_scalars_of_fakes_read_as_one",
    ),
    OpFact(
        ops=("aten.as_strided.default",),
        value=TakesStorageOffset(place=3),
        why="a capture shows the offset of the example; an input of another call may begin elsewhere on its storage",
        test="test_a_model_that_asks_where_its_input_lies_is_planned_for_each_place",
    ),
    OpFact(
        ops=("torch.arange", "torch.full", "torch.ones", "torch.tensor", "torch.zeros"),
        value=MakesConstant(),
        why="that a result is the same in every call does not show in one; torch.rand has no tensor argument either",
        test="test_constants_are_known_and_random_numbers_are_not",
    ),
    OpFact(
        ops=("aten.copy_.default",),
        value=AddedByExport(),
        why="it stands for a buffer that the model replaces by another, which no op of the model's shows",
        test="test_trains_to_the_same_bits_under_every_plan",
    ),
    OpFact(
        ops=("prim.*",),
        value=QueryOnly(),
        why="a fake tensor answers queries such as its device by dispatch, as if they were ops of the step",
        test="test_a_query_is_no_op_of_the_step",
    ),
    OpFact(
        ops=("aten.native_dropout.default", "aten.nll_loss2d_forward.default"),
        value=MadeFirst((1,)),
        why=_ORDER,
        test="test_a_dropout_s_mask_is_allocated_before_its_result",
        device="cuda",
    ),
    OpFact(
        ops=("aten._scaled_dot_product_efficient_attention.default",),
        value=MadeFirst((2, 3)),
        why=_ORDER,
        test="test_an_attention_s_seed_is_allocated_before_its_result",
        device="cuda",
    ),
    OpFact(
        ops=("aten._embedding_bag.default",),
        value=MadeFirst((2, 1)),
        why=_ORDER,
        test="test_bags_are_counted_before_they_are_made",
        device="cuda",
    ),
    OpFact(
        ops=("aten.convolution_backward.default",),
        value=GradientsByMask(1),
        why="one run is recorded; that the kernels are the same in one call and in two is its definition",
        test="test_what_a_backward_does_in_two_calls_to_hold_less_is_one_where_there_is_room",
    ),
    OpFact(
        ops=("aten.convolution_backward.default",),
        value=MadeFirst((1,), where="depthwise"),
        why=_ORDER,
        test="test_a_depthwise_convolution_makes_the_weight_s_gradient_first",
        device="cuda",
    ),
    OpFact(
        ops=("aten.native_batch_norm_backward.default",),
        value=MadeFirst((1, 2), where="channels last"),
        why=_ORDER,
        test="test_a_norm_with_channels_last_makes_the_input_s_gradient_last",
        device="cuda",
    ),
)
