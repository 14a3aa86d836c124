// The graph operations, as TensorFlow sees them. Kernels: arrive_op.cc. Python: horovod_partial/tensorflow/graph.py.
#include <tensorflow/core/framework/common_shape_fns.h>
#include <tensorflow/core/framework/op.h>
#include <tensorflow/core/framework/shape_inference.h>

namespace {

using tensorflow::shape_inference::InferenceContext;

// A bucket is a resource, so that tf.function keeps what arrives at one in order, and nothing else: without a resource
// it would let all stateful operations of a graph wait for each other.
REGISTER_OP("HorovodPartialBucket")
    .Attr("bucket: string")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("HorovodPartialCompleted")
    .Attr("bucket: string")
    .Attr("process_set: int")
    .Input("handle: resource")
    .Output("rounds: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
rounds: how many rounds of a bucket have ended on this rank; 0 if it has not been used.
)doc");

// Stateful: TensorFlow must neither drop it, nor run it once for several, nor while it optimises the graph.
REGISTER_OP("HorovodPartialArrive")
    .Attr("T: {int32, int64, half, float, double}")
    .Attr("N: int >= 1")
    .Attr("bucket: string")
    .Attr("process_set: int")
    .Attr("size: int >= 1")
    .Attr("step: string")
    .Attr("step_buckets: int >= 1")
    // Of the policy, and of the bucket: as in _attach.pyi. Real numbers as text, since an attribute has single
    // precision.
    .Attr("rule: string")
    .Attr("quorum: int")
    .Attr("seed: int")
    .Attr("max_staleness: int")
    .Attr("grace_seconds: string")
    .Attr("schedule: string")
    .Attr("group_size: int")
    .Attr("table: list(int)")
    .Attr("period: int")
    .Attr("window: int")
    .Attr("description: string")
    .Attr("missed: string")
    .Attr("late: string")
    .Attr("divide_by_contributors: bool")
    .Attr("drop_nonfinite: bool")
    .Attr("drop_nonfinite_results: bool")
    .Attr("weights: string")
    .Attr("weight_parameter: string")
    .Attr("prescale_factor: string")
    .Attr("postscale_factor: string")
    .Input("handle: resource")
    .Input("tensors: N * T")
    .Input("work: int32")
    .Output("results: N * T")
    .Output("info: int64")
    .Output("members: int32")
    .Output("member_work: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      int count = 0;
      absl::Status status = context->GetAttr("N", &count);
      if (!status.ok()) return status;
      for (int i = 0; i < count; ++i) context->set_output(i, context->input(1 + i));
      context->set_output(count, context->Vector(6));
      context->set_output(count + 1, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(count + 2, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Arrives at a bucket's open round with the tensors of this rank, packed into one message.

results: the round's result, or what this rank has missed, in the shapes of the tensors.
info: round, late, fresh, gradients, staleness, empty: as RoundInfo.
members: the ranks whose contributions are in the result.
member_work: theirs, as they passed it.
)doc");

}  // namespace
