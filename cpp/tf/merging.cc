#include "tf/merging.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

#include "attach/attachment.h"
#include "engine/engine.h"
#include "tf/library.h"

namespace horovod_partial::tf {

Merging& Merging::Instance() {
  static auto* merging = new Merging;
  return *merging;
}

void Merging::Declare(const MergedSteps::Declaration& declaration) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(declaration.name);
  if (it != entries_.end() && it->second.steps->declaration() == declaration) return;
  auto steps = std::make_unique<MergedSteps>(declaration);
  entries_[declaration.name] = {std::move(steps), {}};
}

void Merging::With(const std::string& name, const std::shared_ptr<attach::Session>& generation,
                   const std::function<void(MergedSteps&)>& body) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = entries_.find(name);
  if (it == entries_.end())
    throw std::invalid_argument("the merged gradients " + name +
                                " are not known in this process: trace the function here, with the tape or the "
                                "optimizer that has fusion=");
  Entry& entry = it->second;
  if (generation != nullptr && entry.generation.lock() != generation) {
    entry.steps->Restart();
    entry.generation = generation;
  }
  body(*entry.steps);
}

}  // namespace horovod_partial::tf

// For horovod_partial/tensorflow/fusion_steps.py. Messages come as their sizes and, one message after the other, as
// their gradients. Names are those that have been declared; what throws says so by returning false, or -1.
namespace {

using horovod_partial::MergedSteps;
using horovod_partial::tf::Merging;

MergedSteps::Messages Messages(std::int64_t count, const std::int64_t* sizes, const std::int64_t* gradients) {
  MergedSteps::Messages messages;
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<int>& message = messages.emplace_back();
    for (std::int64_t j = 0; j < sizes[i]; ++j) message.push_back(static_cast<int>(*gradients++));
  }
  return messages;
}

}  // namespace

#define HOROVOD_PARTIAL_EXPORT extern "C" __attribute__((visibility("default")))

HOROVOD_PARTIAL_EXPORT bool horovod_partial_declare_steps(const char* name, std::int64_t count,
                                                          const std::int64_t* elements, std::int64_t messages,
                                                          const std::int64_t* sizes, const std::int64_t* gradients,
                                                          std::int64_t due, std::int64_t window) try {
  Merging::Instance().Declare({name,
                               {elements, elements + count},
                               Messages(messages, sizes, gradients),
                               due,
                               static_cast<std::size_t>(window)});
  return true;
} catch (const std::invalid_argument&) {
  return false;
}

// All gradients of a step are there, in eager code.
HOROVOD_PARTIAL_EXPORT void horovod_partial_begin_step(const char* name, int process_set) try {
  const auto generation = horovod_partial::attach::SessionOf(horovod_partial::tf::LibraryPath(), process_set);
  Merging::Instance().With(name, generation, [](MergedSteps& steps) {
    steps.RecordAllGradients(std::chrono::duration<double>(horovod_partial::Now()).count());
  });
} catch (const std::exception&) {
  // The arrival that follows tells.
}

HOROVOD_PARTIAL_EXPORT std::int64_t horovod_partial_plans(const char* name) try {
  std::int64_t plans = -1;
  Merging::Instance().With(name, [&](const MergedSteps& steps) { plans = steps.plans(); });
  return plans;
} catch (const std::invalid_argument&) {
  return -1;
}

// `messages` 0: they stay. `due` 0: never again.
HOROVOD_PARTIAL_EXPORT bool horovod_partial_plan_steps(const char* name, std::int64_t messages,
                                                       const std::int64_t* sizes, const std::int64_t* gradients,
                                                       std::int64_t due) try {
  Merging::Instance().With(name, [&](MergedSteps& steps) {
    steps.Plan(messages > 0 ? std::make_optional(Messages(messages, sizes, gradients)) : std::nullopt,
               due > 0 ? std::make_optional(due) : std::nullopt);
  });
  return true;
} catch (const std::invalid_argument&) {
  return false;
}

// Copies the first or the last rows, as many as there are and at most one more than are to be measured, one after the
// other. Returns their number.
HOROVOD_PARTIAL_EXPORT std::int64_t horovod_partial_step_times(const char* name, bool first, double* times) try {
  std::int64_t count = -1;
  Merging::Instance().With(name, [&](const MergedSteps& steps) {
    const auto& rows = first ? steps.first_rows() : steps.last_rows();
    for (const MergedSteps::Row& row : rows) times = std::copy(row.begin(), row.end(), times);
    count = static_cast<std::int64_t>(rows.size());
  });
  return count;
} catch (const std::invalid_argument&) {
  return -1;
}
