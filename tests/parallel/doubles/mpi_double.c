// A test double for MPI_Allreduce, preloaded into the ranks: it can hold a reduction, or let it fail.
//
// Horovod's own negotiation uses MPI_BAND and MPI_BOR on 64-bit words; only sums are touched here.
#include <mpi.h>
#include <stdatomic.h>
#include <unistd.h>

static atomic_int hold, failures, held;

void double_hold(int on) { atomic_store(&hold, on); }      // the next sums wait until this is called with 0
void double_fail(int count) { atomic_store(&failures, count); }  // that many of the next sums fail
int double_held(void) { return atomic_load(&held); }       // sums that wait now

int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  if (op == MPI_SUM) {
    if (atomic_load(&failures) > 0) {
      atomic_fetch_sub(&failures, 1);
      return MPI_ERR_OTHER;
    }
    if (atomic_load(&hold)) {
      atomic_fetch_add(&held, 1);
      while (atomic_load(&hold)) usleep(200);
      atomic_fetch_sub(&held, 1);
    }
  }
  return PMPI_Allreduce(send, receive, count, type, op, comm);
}
