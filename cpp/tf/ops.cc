// Declares the graph operations to TensorFlow. Kernels: *_op.cc. Python: horovod_partial/tensorflow/graph.py.
#include <tensorflow/core/framework/common_shape_fns.h>
#include <tensorflow/core/framework/op.h>
#include <tensorflow/core/framework/shape_inference.h>

namespace {

using tensorflow::shape_inference::InferenceContext;

// A bucket is a resource. So tf.function orders the arrivals at one bucket, but not those at different buckets.
// Without resources, all stateful operations of a graph would wait for each other.
REGISTER_OP("HorovodPartialBucket")
    .Attr("bucket: string")
    .Output("handle: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// An arrival is stateful: TensorFlow must not drop it, merge equal arrivals, or run it when it optimises the graph.
REGISTER_OP("HorovodPartialArrive")
    .Attr("T: {int32, int64, half, float, double}")
    .Attr("process_set: int")
    .Attr("size: int >= 1")
    .Attr("spec: string")  // the bytes of Python's BucketSpec.encode; only C++ reads them
    .Attr("N: int >= 1")
    .Attr("bucket: string")
    .Attr("graph: bool")
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

// HorovodPartialMemory is stateful, because otherwise TensorFlow would give equal operations one piece of memory.
REGISTER_OP("HorovodPartialMemory")
    .Attr("T: {int32, int64, half, float, double}")
    .Attr("N: int >= 1")
    .Attr("shapes: list(shape)")
    .Output("tensors: N * T")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Tensors of one bucket, side by side as they travel; what is in them is undefined.
)doc");

// HorovodPartialTakeRound has the buckets as inputs. So it runs after its step's arrivals and before the next step's.
REGISTER_OP("HorovodPartialTakeRound")
    .Attr("N: int >= 1")
    .Attr("buckets: list(string)")
    .Attr("counts: list(int)")
    .Attr("T: list(type)")
    .Attr("process_set: int")
    .Input("handles: N * resource")
    .Input("memory: T")
    .Output("results: T")
    .Output("gradients: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      int buckets = 0;
      const absl::Status status = context->GetAttr("N", &buckets);
      if (!status.ok()) return status;
      const int tensors = context->num_inputs() - buckets;
      for (int i = 0; i < tensors; ++i) context->set_output(i, context->input(buckets + i));
      context->set_output(tensors, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes the oldest round that has ended in all buckets of a family, and that this rank has not taken.

memory: of the buckets: what HorovodPartialArrive or HorovodPartialMemory gave, and nobody else uses.
results: the round's, in that memory.
gradients: how many are in it, in all its buckets together; 0 if there was no such round.
)doc");

REGISTER_OP("HorovodPartialHasRound")
    .Attr("N: int >= 1")
    .Attr("buckets: list(string)")
    .Attr("process_set: int")
    .Input("handles: N * resource")
    .Output("found: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

}  // namespace
