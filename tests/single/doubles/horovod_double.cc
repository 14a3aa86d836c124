// A test double for a framework's Horovod library: the names that an attachment looks for, and virtual tables of its
// own. Its functions count their calls.
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace horovod::common {

struct OpContext;
struct Tensor;
struct ReadyEventList {};
struct TensorTableEntry;
struct RequestList {};
struct Response;
struct ResponseList {};
struct Status {};
enum class ReduceOp {};

Status EnqueueTensorAllreduce(std::shared_ptr<OpContext>, std::shared_ptr<Tensor>, std::shared_ptr<Tensor>,
                              ReadyEventList, std::string, int, std::function<void(const Status&)>, ReduceOp, double,
                              double, int) {
  return {};
}

static int calls = 0;

class Controller {
 public:
  virtual ~Controller() = default;
  virtual void DoInitialization() = 0;
  virtual void CrossRankBitwiseAnd(std::vector<long long>&, int) = 0;
  virtual void SendReadyTensors(RequestList&) = 0;
  virtual void RecvReadyTensors(std::vector<std::string>&, std::vector<RequestList>&) = 0;
  virtual void SendFinalTensors(ResponseList&) = 0;
  virtual void RecvFinalTensors(ResponseList&) = 0;
};

#define CONTROLLER(name)                                                                         \
  class name : public Controller {                                                               \
   public:                                                                                       \
    void DoInitialization() override;                                                            \
    void CrossRankBitwiseAnd(std::vector<long long>&, int) override;                             \
    void SendReadyTensors(RequestList&) override;                                                \
    void RecvReadyTensors(std::vector<std::string>&, std::vector<RequestList>&) override;        \
    void SendFinalTensors(ResponseList&) override;                                               \
    void RecvFinalTensors(ResponseList&) override;                                               \
  };                                                                                             \
  void name::DoInitialization() { ++calls; }                                                     \
  void name::CrossRankBitwiseAnd(std::vector<long long>&, int) { ++calls; }                      \
  void name::SendReadyTensors(RequestList&) { ++calls; }                                         \
  void name::RecvReadyTensors(std::vector<std::string>&, std::vector<RequestList>&) { ++calls; } \
  void name::SendFinalTensors(ResponseList&) { ++calls; }                                        \
  void name::RecvFinalTensors(ResponseList&) { ++calls; }

#define OPERATION(name)                                                      \
  class name {                                                               \
   public:                                                                   \
    virtual ~name() = default;                                               \
    virtual Status Execute(std::vector<TensorTableEntry>&, const Response&); \
  };                                                                         \
  Status name::Execute(std::vector<TensorTableEntry>&, const Response&) { return {}; }

CONTROLLER(GlooController)
CONTROLLER(MPIController)
OPERATION(GlooAllreduce)
OPERATION(MPIAllreduce)
OPERATION(NCCLAllreduce)

}  // namespace horovod::common

using namespace horovod::common;

extern "C" {

int horovod_is_initialized() { return 0; }

int double_calls() { return calls; }

// What Horovod's thread calls in a cycle, of each controller.
void double_run_cycle() {
  GlooController gloo;
  MPIController mpi;
  for (Controller* volatile controller : {static_cast<Controller*>(&gloo), static_cast<Controller*>(&mpi)}) {
    std::vector<long long> bits;
    std::vector<std::string> names;
    std::vector<RequestList> ready;
    RequestList requests;
    ResponseList responses;
    controller->CrossRankBitwiseAnd(bits, 0);
    controller->SendReadyTensors(requests);
    controller->RecvReadyTensors(names, ready);
    controller->SendFinalTensors(responses);
    controller->RecvFinalTensors(responses);
  }
}

}  // extern "C"
