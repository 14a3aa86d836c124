#include "engine/possible_arrivals.h"

#include <algorithm>
#include <map>
#include <utility>

namespace horovod_partial {

struct PossibleArrivals::Graph {
  std::shared_ptr<Bringer> bringer;
  std::set<Bucket*> buckets;  // the buckets to which runs of this graph have contributed
  std::int64_t run = 0;       // the number of the last run of this graph
  std::set<Bucket*> arrived;  // the buckets that have got a contribution in the last run
  Time complete = kNever;     // since when all `buckets` have had a contribution in the last run, or kNever
};

namespace {

constexpr Round kRemembered = 8;  // a thread is expected at a bucket for so many rounds after it was there last
constexpr int kSilentIntervals = 10;
// A thread that polls a collective of Horovod's own at longer intervals than this may do other work in between.
constexpr Time kPollGap = std::chrono::milliseconds(100);
// No event reports that a thread has ended. So what Look returns holds for at most this time.
constexpr Time kLongestLook = std::chrono::milliseconds(100);

// A thread's Bringer objects, by the id of the PossibleArrivals object. The destructor runs when the thread ends.
struct OfThread {
  ~OfThread() {
    for (const auto& [id, bringer] : bringers) bringer->lives = false;
  }
  std::map<std::uint64_t, std::shared_ptr<PossibleArrivals::Bringer>> bringers;
};

}  // namespace

std::uint64_t PossibleArrivals::NextId() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

std::shared_ptr<PossibleArrivals::Bringer> PossibleArrivals::Self() {
  static thread_local OfThread self;
  auto& bringer = self.bringers[id_];
  if (bringer == nullptr) bringer = std::make_shared<Bringer>();
  return bringer;
}

// Locks the mutex for an event that may change the answer of Look.
std::unique_lock<std::mutex> PossibleArrivals::LockForEvent() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++events_;
  return lock;
}

// SetWaiting, and all private functions below it, are called with the mutex held.
void PossibleArrivals::SetWaiting(Bringer& bringer, Time since) {
  waiting_ += (since != kNever ? 1 : 0) - (bringer.waits_since != kNever ? 1 : 0);
  bringer.waits_since = since;
}

std::shared_ptr<PossibleArrivals::Bringer> PossibleArrivals::BeginFlush(const void* engine, Time now) {
  auto self = Self();
  const auto lock = LockForEvent();
  SetWaiting(*self, now);
  self->flushes = engine;
  self->polled = kNever;
  return self;
}

void PossibleArrivals::EndFlush(Bringer& bringer, Time now) {
  const auto lock = LockForEvent();
  active_ = now;
  SetWaiting(bringer, kNever);
  bringer.flushes = nullptr;
}

PossibleArrivals::ForeignWait::ForeignWait(std::shared_ptr<PossibleArrivals> bringers, Time now)
    : owner_(std::move(bringers)), self_(owner_->Self()) {
  const auto lock = owner_->LockForEvent();
  before_ = self_->parked_since;
  self_->parked_since = std::min(before_, now);
  self_->awaits.reset();
  owner_->parked_.insert(self_);
}

PossibleArrivals::ForeignWait::~ForeignWait() {
  const auto lock = owner_->LockForEvent();
  self_->parked_since = before_;
  self_->awaits.reset();
  if (before_ == kNever) owner_->parked_.erase(self_);
}

Time PossibleArrivals::Polled(bool over, Time now) {
  const auto self = Self();
  std::lock_guard<std::mutex> lock(mutex_);
  if (over && self->polled == kNever) return Time(0);
  ++events_;
  if (over) {
    self->polled = kNever;
    pollers_.erase(self);
    return Time(0);
  }
  self->awaits.reset();
  pollers_.insert(self);
  if (self->polled == kNever || now - self->polled > kPollGap) self->polls_since = now;
  self->polled = now;
  return now - self->polls_since;
}

bool PossibleArrivals::AwaitsForeign() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !parked_.empty() || !pollers_.empty();
}

void PossibleArrivals::EndForeignWaits(const std::vector<Collective>& outstanding) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto has_ended = [&](const Collective& each) {
    return std::find(outstanding.begin(), outstanding.end(), each) == outstanding.end();
  };
  const auto end_those_of = [&](auto& threads, Time Bringer::* since) {
    for (auto it = threads.begin(); it != threads.end();) {
      Bringer& thread = **it;
      if (!thread.awaits) thread.awaits = outstanding;
      auto& awaits = *thread.awaits;
      awaits.erase(std::remove_if(awaits.begin(), awaits.end(), has_ended), awaits.end());
      if (thread.lives && !awaits.empty()) {
        ++it;
        continue;
      }
      ++events_;
      thread.*since = kNever;
      it = threads.erase(it);
    }
  };
  end_those_of(parked_, &Bringer::parked_since);
  end_those_of(pollers_, &Bringer::polled);
}

PossibleArrivals::Bucket::Bucket(std::shared_ptr<PossibleArrivals> bringers, const void* engine, std::string name)
    : owner_(std::move(bringers)), engine_(engine), name_(std::move(name)) {
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  owner_->buckets_.insert(this);
}

PossibleArrivals::Bucket::~Bucket() {
  const auto lock = owner_->LockForEvent();
  owner_->buckets_.erase(this);
  owner_->open_ -= open_ ? 1 : 0;
  for (const auto& waiter : waiters_) owner_->SetWaiting(*waiter, kNever);
  if (graph_ == nullptr) return;
  graph_->buckets.erase(this);
  graph_->arrived.erase(this);
  if (graph_->buckets.empty()) owner_->graphs_.erase(graph_);
}

void PossibleArrivals::Bucket::Add(std::vector<Visit>& visits, const std::shared_ptr<Bringer>& bringer, Round round) {
  const auto gone = [&](const Visit& visit) { return visit.bringer == bringer || visit.round + kRemembered < round; };
  visits.erase(std::remove_if(visits.begin(), visits.end(), gone), visits.end());
  visits.push_back({bringer, round});
}

void PossibleArrivals::Bucket::Arrive(const Caller& caller, Round round, Time now) {
  const auto self = caller.kind == Caller::Kind::kGraph ? nullptr : owner_->Self();
  const auto lock = owner_->LockForEvent();
  owner_->active_ = arrived_ = now;
  round_ = round;
  if (free_ != kNever && !left_out_) intervals_[next_interval_++ % intervals_.size()] = now - free_;
  left_out_ = false;
  outstanding_ = true;
  if (self == nullptr) return ArriveInRun(caller.run, now);
  self->polled = kNever;
  Add(arrivals_, self, round);
  if (caller.kind != Caller::Kind::kBlockedThread) return;
  blocked_ = self;
  AddWaiter(self, now);
}

void PossibleArrivals::Bucket::AddWaiter(const std::shared_ptr<Bringer>& waiter, Time now) {
  if (waiters_.empty()) waited_since_ = now;
  waiters_.push_back(waiter);
}

// Records that a run of a TensorFlow graph contributes to this bucket. A graph here is the set of buckets that get
// contributions in one run. Two graphs that have been in progress at the same time are run by two threads, so each has
// its own Bringer object. All other graphs share one such object, because one thread may run them in turn.
void PossibleArrivals::Bucket::ArriveInRun(std::int64_t run, Time now) {
  auto& graphs = owner_->graphs_;
  const auto same_run =
      std::find_if(graphs.begin(), graphs.end(), [&](const auto& graph) { return graph->run == run; });
  const std::shared_ptr<Graph> other = same_run == graphs.end() ? nullptr : *same_run;
  if (graph_ == nullptr) {
    if (owner_->all_graphs_ == nullptr) {
      owner_->all_graphs_ = std::make_shared<Bringer>();
      owner_->all_graphs_->graphs = true;
    }
    graph_ = other;
    if (graph_ == nullptr) {
      graph_ = std::make_shared<Graph>();
      graph_->bringer = owner_->all_graphs_;
      graphs.insert(graph_);
    }
    graph_->buckets.insert(this);
  } else if (other != nullptr && other != graph_) {
    for (Bucket* bucket : other->buckets) bucket->graph_ = graph_;
    graph_->buckets.merge(other->buckets);
    graph_->arrived = other->arrived;
    graph_->run = run;
    graphs.erase(other);
  }
  if (std::exchange(graph_->run, run) != run) {
    graph_->arrived.clear();
    graph_->complete = kNever;
  }
  for (const auto& graph : graphs) {
    const bool runs = std::any_of(graph->buckets.begin(), graph->buckets.end(),
                                  [](const Bucket* bucket) { return bucket->outstanding_; });
    if (graph == graph_ || graph->bringer != graph_->bringer || !runs) continue;
    graph_->bringer = std::make_shared<Bringer>();
    graph_->bringer->graphs = true;
  }
  graph_->arrived.insert(this);
  if (graph_->arrived.size() == graph_->buckets.size()) graph_->complete = now;
}

void PossibleArrivals::Bucket::SetOpen(bool open, Time now) {
  const auto lock = owner_->LockForEvent();
  if (std::exchange(open_, open) == open) return;
  owner_->open_ += open ? 1 : -1;
  for (const auto& waiter : waiters_) owner_->SetWaiting(*waiter, open ? now : kNever);
}

void PossibleArrivals::Bucket::Done(Round round, Time now) {
  SetOpen(false, now);
  const auto lock = owner_->LockForEvent();
  outstanding_ = false;
  if (graph_ != nullptr) free_ = owner_->active_ = now;
  if (blocked_ == nullptr) return;
  Collect(blocked_, round, now);
  waiters_.erase(std::find(waiters_.begin(), waiters_.end(), blocked_));
  blocked_ = nullptr;
}

void PossibleArrivals::Bucket::Collect(const std::shared_ptr<Bringer>& bringer, Round round, Time now) {
  free_ = owner_->active_ = now;
  bringer->polled = kNever;
  Add(collections_, bringer, round);
}

void PossibleArrivals::Bucket::BeginWait(Time now) {
  const auto self = owner_->Self();
  const auto lock = owner_->LockForEvent();
  AddWaiter(self, now);
  if (open_) owner_->SetWaiting(*self, now);
}

void PossibleArrivals::Bucket::EndWait(bool collects, Round round, Time now) {
  const auto self = owner_->Self();
  const auto lock = owner_->LockForEvent();
  const auto waiter = std::find(waiters_.begin(), waiters_.end(), self);
  if (waiter != waiters_.end()) {
    waiters_.erase(waiter);
    owner_->SetWaiting(*self, kNever);
  }
  if (collects) Collect(self, round, now);
}

void PossibleArrivals::Bucket::Claim(Round round) {
  const auto self = owner_->Self();
  const auto lock = owner_->LockForEvent();
  Add(collections_, self, round);
}

Time PossibleArrivals::Bucket::UnattendedSince() const {
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  if (blocked_ != nullptr) return arrived_;
  return graph_ != nullptr && graph_->arrived.count(const_cast<Bucket*>(this)) > 0 ? graph_->complete : kNever;
}

Time PossibleArrivals::Bucket::WaitsSince() const {
  if (!waiters_.empty()) return waited_since_;
  const bool complete = graph_ != nullptr && outstanding_ && graph_->arrived.size() == graph_->buckets.size();
  return complete ? graph_->complete : kNever;
}

PossibleArrivals::Wait PossibleArrivals::LongestWait() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Wait longest;
  for (const Bucket* bucket : buckets_)
    if (const Time since = bucket->WaitsSince(); since < longest.since)
      longest = {since, bucket->engine_, "a round of " + bucket->name_, false};
  for (const Wait& wait : flush_waits_)
    if (longest.since == kNever || (!wait.ends && (longest.ends || wait.since < longest.since))) longest = wait;
  return longest;
}

PossibleArrivals::FlushWait::FlushWait(std::shared_ptr<PossibleArrivals> bringers, const void* engine, bool ends,
                                       Time now)
    : owner_(std::move(bringers)) {
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  wait_ = owner_->flush_waits_.insert(owner_->flush_waits_.end(), {now, engine, ends ? "its end" : "a flush", ends});
}

PossibleArrivals::FlushWait::~FlushWait() {
  std::lock_guard<std::mutex> lock(owner_->mutex_);
  owner_->flush_waits_.erase(wait_);
}

std::vector<PossibleArrivals::Bringer*> PossibleArrivals::BringersOf(const Bucket& bucket) const {
  std::vector<Bringer*> bringers;
  for (const auto& visit : bucket.collections_)
    if (visit.bringer->lives) bringers.push_back(visit.bringer.get());
  if (bringers.empty()) {
    for (const auto& visit : bucket.arrivals_)
      if (visit.bringer->lives) bringers.push_back(visit.bringer.get());
  }
  if (bucket.graph_ != nullptr) bringers.push_back(bucket.graph_->bringer.get());
  return bringers;
}

Time PossibleArrivals::WaitsSince(const Bringer& bringer) const {
  if (!bringer.graphs) return bringer.waits_since;
  Time since = kNever;
  for (const auto& graph : graphs_) {
    const bool open =
        std::any_of(graph->buckets.begin(), graph->buckets.end(), [](const Bucket* bucket) { return bucket->open_; });
    if (graph->bringer.get() == &bringer && open) since = std::min(since, graph->complete);
  }
  return since;
}

bool PossibleArrivals::InProgress(const Bringer& graphs) const {
  return std::any_of(graphs_.begin(), graphs_.end(), [&](const auto& graph) {
    const bool outstanding = std::any_of(graph->buckets.begin(), graph->buckets.end(),
                                         [](const Bucket* bucket) { return bucket->outstanding_; });
    return graph->bringer.get() == &graphs && outstanding;
  });
}

// Returns in words where a thread waits in another process set: in round 0 of a bucket or in a flush. Returns an empty
// text if no thread does. Round 0 and a flush need all ranks, so such a wait does not end while a rank is blocked.
std::string PossibleArrivals::WaitElsewhere(const void* engine) const {
  for (const Bucket* bucket : buckets_)
    if (bucket->engine_ != engine && bucket->open_ && bucket->round_ == 0 && bucket->WaitsSince() != kNever)
      return "in round 0 of " + bucket->name_;
  const auto flushes = [&](const Wait& wait) { return wait.engine != engine && !wait.ends; };
  return std::any_of(flush_waits_.begin(), flush_waits_.end(), flushes) ? "in a flush" : "";
}

PossibleArrivals::Away PossibleArrivals::Look(const void* engine, Time now, const Foreign& foreign, bool flushes,
                                              const Thresholds& thresholds) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Away away;
  away.events = events_;
  away.until = now + kLongestLook;
  // Returns true if `time` has passed. If it has not, the answer of Look holds no longer than until `time`.
  const auto passed = [&](Time time) {
    if (now > time) return true;
    away.until = std::min(away.until, time);
    return false;
  };
  if (waiting_ == 0 && open_ == 0 && parked_.empty() && !flushes && foreign.since == kNever) return away;

  struct State {
    bool waits = false;
    bool absent = false;
  };
  std::map<const Bringer*, State> states;
  // The buckets of this process set without a waiting contribution, and the threads that are expected at each bucket.
  std::vector<std::pair<const Bucket*, std::vector<Bringer*>>> brought;
  for (const Bucket* bucket : buckets_) {
    std::vector<Bringer*> bringers = BringersOf(*bucket);
    for (const Bringer* bringer : bringers) states[bringer];
    if (bucket->engine_ == engine && !bucket->open_) brought.emplace_back(bucket, std::move(bringers));
  }
  const auto graphs = std::count_if(states.begin(), states.end(), [](const auto& item) { return item.first->graphs; });
  const auto is_parked = [&](const Bringer* bringer, Time least) {
    return bringer->parked_since != kNever && passed(bringer->parked_since + least);
  };
  bool asks = false;  // true if some thread has lately polled a collective of Horovod's own
  for (auto& [bringer, state] : states) {
    const Time since = WaitsSince(*bringer);
    state.waits = since != kNever && passed(since + thresholds.waiting);
    // TensorFlow does not tell which thread runs a graph. If all graphs share one Bringer object, and no graph is in
    // progress, we assume that the thread in the flush runs the graphs. So the graphs count as out of training.
    const bool runs_nothing = bringer->graphs && graphs == 1 && !InProgress(*bringer);
    const bool polls = bringer->polled != kNever && !passed(bringer->polled + kPollGap) &&
                       passed(bringer->polls_since + thresholds.parked);
    state.absent =
        (flushes && (bringer->flushes == engine || runs_nothing)) || is_parked(bringer, thresholds.parked) || polls;
    asks = asks || (bringer->polled != kNever && !passed(bringer->polled + thresholds.silence));
  }
  const auto is_away = [&](const Bringer* bringer) { return states[bringer].waits || states[bringer].absent; };
  const auto is_absent = [&](const Bringer* bringer) { return states[bringer].absent; };
  const bool all_away = std::all_of(states.begin(), states.end(),
                                    [](const auto& item) { return item.second.waits || item.second.absent; });
  const bool anybody = !states.empty();

  // A collective of Horovod's own may be outstanding while no thread has contributed, collected a result or left a
  // flush for some time. Then we assume that all threads wait for Horovod, unless Python code reports that none does.
  const bool may_be_parked = foreign.since != kNever && (!foreign.told || asks || !parked_.empty()) &&
                             passed(std::max(foreign.since, active_) + thresholds.parked);
  bool all_silent = !brought.empty();
  for (const auto& [bucket, bringers] : brought) {
    const Time longest = bucket->next_interval_ == 0
                             ? thresholds.silence  // no interval between rounds is known
                             : *std::max_element(bucket->intervals_.begin(), bucket->intervals_.end());
    const bool silent = passed(active_ + std::max(thresholds.silence, kSilentIntervals * longest));
    all_silent = all_silent && silent;
    bucket->left_out_ = bucket->left_out_ || (silent && may_be_parked);
    const bool none_lives = bringers.empty();
    const bool none_comes = !none_lives && std::all_of(bringers.begin(), bringers.end(), is_away);
    const bool out_of_training = std::any_of(bringers.begin(), bringers.end(), is_absent);
    if (silent ? flushes || may_be_parked : (none_lives && flushes) || (none_comes && out_of_training))
      away.absent.names.push_back(bucket->name_);
    if (silent ? waiting_ > 0 || open_ > 0 : none_comes) away.waiting.names.push_back(bucket->name_);
  }
  const auto cover = [&](BucketSet& set, bool all) {
    std::sort(set.names.begin(), set.names.end());
    set.all = all && set.names.size() == brought.size();
    if (set.all) set.names.clear();
  };
  const bool somebody_absent = std::any_of(states.begin(), states.end(), [](const auto& i) { return i.second.absent; });
  cover(away.waiting, (anybody && all_away) || all_silent);
  // A rank that has used no bucket yet (it may run with another policy) has no thread that is expected to contribute.
  const bool unused =
      std::all_of(buckets_.begin(), buckets_.end(), [](const Bucket* bucket) { return IsOfFlushes(bucket->name_); });
  const bool parked_before_training = unused && std::any_of(parked_.begin(), parked_.end(), [&](const auto& thread) {
                                        return is_parked(thread.get(), thresholds.silence);
                                      });
  const bool out_before_training = parked_before_training || (unused && !foreign.told && foreign.since != kNever &&
                                                              passed(foreign.since + thresholds.silence));
  cover(away.absent, (all_away && (flushes || (anybody && somebody_absent) || out_before_training)) ||
                         (all_silent && !away.absent.names.empty()));
  away.blocked = all_away && (anybody || flushes || parked_before_training);
  if (away.blocked) away.elsewhere = WaitElsewhere(engine);
  return away;
}

}  // namespace horovod_partial
