#include "simulator/job.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "simulator/clock.h"

namespace horovod_partial {
namespace {

constexpr double kSignalBytes = 4;
constexpr Time kWaiting = std::chrono::milliseconds(5);  // ranks report a wait of this length (Thresholds::waiting)
constexpr Round kForEver = std::numeric_limits<std::int32_t>::max();

// All bucket names are equally long, so they sort like the messages' numbers. Rounds close in the order of the names.
constexpr std::size_t kFirstName = 1000000;
std::string NameOfMessage(std::size_t message) { return std::to_string(kFirstName + message); }
std::size_t MessageOfName(const std::string& name) { return std::stoul(name) - kFirstName; }

BucketOptions OptionsOf(const JobConfig& config, bool signal) {
  BucketOptions options;
  options.type = DataType::kFloat64;
  options.elements = 1;
  options.late = signal ? Late::kDiscard : config.late;
  options.missed = options.late == Late::kAccumulate ? Missed::kSum : Missed::kLatest;
  options.divisor = options.late == Late::kAccumulate ? Divisor::kNone : Divisor::kContributors;
  return options;
}

}  // namespace

Job::Job(JobConfig config)
    : config_(std::move(config)),
      coordinator_(config_.ranks),
      ranks_(static_cast<std::size_t>(config_.ranks)),
      negotiated_(-FromSeconds(config_.cycle)) {
  signal_policy_.max_staleness = kForEver;
  signal_policy_.grace = Time(0);
  const std::size_t messages = config_.messages.size() + (HasPeriods() ? 1 : 0);
  for (RankState& state : ranks_) {
    state.periods = Periods(config_.period);
    state.locals.reserve(messages);
    for (std::size_t message = 0; message < messages; ++message)
      state.locals.push_back({Bucket(NameOfMessage(message), OptionsOf(config_, message == Signal()))});
  }
  result_.ends.resize(config_.delays.size());
  result_.messages.resize(config_.messages.size());
  result_.received.resize(ranks_.size());
}

JobResult Job::Run() {
  for (Rank rank = 0; rank < config_.ranks; ++rank) StartStep(rank);
  for (;;) {
    const Time finish = running_.empty() ? kNever : running_.front().end;
    const Time event = events_.empty() ? kNever : events_.top().first;
    const Time next = std::min({finish, event, NextNegotiation()});
    if (next == kNever) {
      if (ended_ == config_.ranks || !CloseByLiveness()) break;
      continue;
    }
    now_ = next;
    // Events at the same time have an order: rounds end, then ranks arrive, then a cycle begins with these arrivals.
    if (finish == now_) {
      Finish();
    } else if (event == now_) {
      const Rank rank = events_.top().second;
      events_.pop();
      Compute(rank);
    } else {
      Negotiate();
    }
  }
  if (ended_ < config_.ranks) throw std::logic_error("the ranks of a simulation wait for each other");
  for (Rank rank = 0; rank < config_.ranks; ++rank)
    for (Local& local : At(rank).locals)
      if (local.bucket.HasMissed()) Receive(rank, local, false);
  return std::move(result_);
}

void Job::StartStep(Rank rank) {
  RankState& state = At(rank);
  if (state.iteration == config_.iterations) {
    state.ended = true;
    ++ended_;
    HaveNews(rank);
    return;
  }
  const auto at = static_cast<std::size_t>(state.iteration) * ranks_.size() + Index(rank);
  state.start = now_ + FromSeconds(config_.delays[at]);
  state.next = AveragesAfterCompute() ? config_.messages.size() : 0;
  state.computing = true;
  Compute(rank);
}

// Makes a rank arrive with all messages that are ready. Runs again when another message is ready or the compute ends.
void Job::Compute(Rank rank) {
  RankState& state = At(rank);
  while (state.next < config_.messages.size()) {
    const Time ready = state.start + FromSeconds(config_.messages[state.next].ready);
    if (ready > now_) {
      events_.push({ready, rank});
      return;
    }
    Arrive(rank, state.next++);
  }
  const Time end = state.start + FromSeconds(config_.compute);
  if (end > now_) {
    events_.push({end, rank});
    return;
  }
  state.computing = false;
  state.averaged = !AveragesAfterCompute();
  state.periods.TakeStep();
  Proceed(rank);
}

// After a step's compute: if no result is outstanding, averages models if an average is due, and begins the next step.
void Job::Proceed(Rank rank) {
  RankState& state = At(rank);
  if (state.outstanding > 0) return;
  if (!state.averaged) {
    bool due = true;
    if (HasPeriods()) {
      const Bucket& signal = state.locals[Signal()].bucket;
      while (state.periods.MustSignal(signal.completed())) {
        Arrive(rank, Signal());
        if (state.outstanding > 0) return;
      }
      due = state.periods.IsOver(signal.completed());
      if (due) state.periods.BeginNext();
    }
    state.averaged = true;
    if (due) {
      Arrive(rank, 0);
      const bool last = state.iteration + 1 == config_.iterations;
      if (state.outstanding > 0 && (last || !config_.overlap)) return;
    }
  }
  if (std::exchange(state.waits, false)) HaveNews(rank);
  const auto at = static_cast<std::size_t>(state.iteration) * ranks_.size() + Index(rank);
  result_.ends[at] = ToSeconds(now_);
  ++state.iteration;
  StartStep(rank);
}

void Job::Arrive(Rank rank, std::size_t message) {
  RankState& state = At(rank);
  Local& local = state.locals[message];
  local.value = 1;
  local.arrived = now_;
  const Bucket::Arrived outcome = local.bucket.Arrive({&local.value, &local.value, 1});
  if (message != Signal()) {
    ++result_.arrivals;
    result_.late += outcome == Bucket::Arrived::kOnTime ? 0 : 1;
  }
  open_ += outcome == Bucket::Arrived::kOnTime ? 1 : 0;
  if (outcome == Bucket::Arrived::kLate) {
    Receive(rank, local, false);
  } else {
    local.outstanding = true;
    ++state.outstanding;
  }
  MakeReportable(state, message);
  // A rank that arrives while a round is being reduced reports the arrival only when that round has ended.
  if (outcome != Bucket::Arrived::kWaiting) HaveNews(rank);
}

void Job::Receive(Rank rank, Local& local, bool on_time) {
  if (!on_time) local.bucket.TakeMissed(&local.value);
  result_.received[Index(rank)] += local.value;
}

void Job::MakeReportable(RankState& state, std::size_t message) {
  if (!std::exchange(state.locals[message].reportable, true)) state.reportable.push_back(message);
}

void Job::HaveNews(Rank rank) {
  if (!std::exchange(At(rank).has_news, true)) news_.push_back(rank);
  wanted_ = std::min(wanted_, now_);
}

Time Job::NextNegotiation() const {
  if (over_) return kNever;
  // Before the end of the job a round closes only if a rank has arrived. So while no arrival waits (`idle`), the ranks
  // need no negotiation. The coordinator may still need one (`deadline_`), for example to learn that a round has ended.
  const bool idle = open_ == 0 && ended_ < config_.ranks;
  const Time wanted = idle ? deadline_ : std::min(wanted_, deadline_);
  if (wanted == kNever) return kNever;
  const Time cycle = FromSeconds(config_.cycle);
  return NegotiatedAt(std::max(free_, negotiated_ + cycle), std::max(wanted, now_), cycle);
}

void Job::Negotiate() {
  negotiated_ = now_;
  wanted_ = kNever;
  for (const Rank rank : std::exchange(news_, {})) Observe(rank);
  for (const Closing& closing : coordinator_.Decide(now_)) Begin(closing);
  deadline_ = coordinator_.NextDeadline();
}

// Called when no reduction runs and no rank computes. All ranks that have not ended report that they wait. Returns true
// if this closes a round.
bool Job::CloseByLiveness() {
  now_ += kWaiting;
  for (Rank rank = 0; rank < config_.ranks; ++rank) {
    At(rank).waits = !At(rank).ended;
    HaveNews(rank);
  }
  Negotiate();
  return !running_.empty();
}

void Job::Observe(Rank rank) {
  RankState& state = At(rank);
  state.has_news = false;
  Report report;
  report.absent.all = state.ended;
  report.waiting.all = state.waits;
  report.flush = state.ended ? Report::Flush::kEnding : Report::Flush::kNone;
  for (const std::size_t message : std::exchange(state.reportable, {})) {
    Local& local = state.locals[message];
    local.reportable = false;
    Report::Item item;
    item.bucket = local.bucket.name();
    item.age = now_ - local.arrived;
    if (local.bucket.state() == Bucket::State::kArrived && !local.bucket.reported()) {
      item.gradients = local.bucket.ReportArrival();
      item.work = local.bucket.arrival().work;
      if (!local.bucket.declared()) item.declaration = Declaration{PolicyOf(message)};
    } else {
      item.kind = Report::Item::Kind::kPending;
      item.gradients = local.bucket.ReportPending();
      item.late = local.bucket.ReportLate();
      const bool leaves = state.ended && config_.late == Late::kKeep;
      if (item.gradients == 0 || leaves) continue;
      MakeReportable(state, message);  // a rank reports a pending contribution again until it is delivered
    }
    report.items.push_back(std::move(item));
  }
  coordinator_.Observe(rank, report, now_);
}

void Job::Begin(const Closing& closing) {
  if (!closing.error.empty()) throw std::logic_error(closing.error);
  over_ = over_ || closing.reason == Closing::Reason::kEnd;
  const std::size_t message = MessageOfName(closing.bucket);
  if (message != Signal()) result_.messages[message].Record(closing);
  const double bytes = message == Signal() ? kSignalBytes : config_.messages[message].bytes;
  const Time start = std::max(now_, free_);
  const auto first = static_cast<std::ptrdiff_t>(running_.size());
  const auto begin = [&](const Members& members) {
    Reduce(closing, message, members);
    const Time end = start + FromSeconds(config_.costs[members.size() - 1](bytes));
    running_.push_back({end, message, members});
    free_ = std::max(free_, end);
  };
  if (closing.groups.empty()) {
    begin(closing.members(0));
  } else {
    for (const Members& members : GroupsOf(closing.groups)) begin(members);
  }
  std::stable_sort(running_.begin() + first, running_.end(),
                   [](const Reduction& a, const Reduction& b) { return a.end < b.end; });
}

// Reduces within a group. Each member gets a Closing with two contributions only: its own, and the sum of all others in
// the group. With 2,048 ranks, copies of the whole Closing would take longer than all other work.
void Job::Reduce(const Closing& closing, std::size_t message, const Members& members) {
  Closing view;
  view.bucket = closing.bucket;
  view.round = closing.round;
  view.reason = closing.reason;
  view.contributions.resize(2);
  int gradients = 0;
  for (const Rank rank : members) gradients += closing.contributions[Index(rank)].gradients;
  double sum = 0;
  std::vector<double*> outputs;
  for (const Rank rank : members) {
    view.contributions[0] = closing.contributions[Index(rank)];
    view.contributions[1].gradients = gradients - view.contributions[0].gradients;
    const Bucket::Entry entry = At(rank).locals[message].bucket.Begin(view, 0);
    sum += *static_cast<const double*>(entry.input);
    outputs.push_back(static_cast<double*>(entry.output));
    open_ -= view.contributions[0].fresh ? 1 : 0;
  }
  for (double* output : outputs) *output = sum;
}

void Job::Finish() {
  const Reduction reduction = std::move(running_.front());
  running_.pop_front();
  for (const Rank rank : reduction.members) {
    RankState& state = At(rank);
    Local& local = state.locals[reduction.message];
    const bool on_time = local.bucket.Finish();
    // After each round the rank reports its kept model, or a contribution that came while the round was reduced.
    if (local.bucket.HasUnannounced() || local.bucket.options().late == Late::kKeep) {
      MakeReportable(state, reduction.message);
      HaveNews(rank);
    }
    if (!std::exchange(local.outstanding, false)) continue;
    Receive(rank, local, on_time);
    --state.outstanding;
    if (!state.computing) Proceed(rank);
  }
}

}  // namespace horovod_partial
