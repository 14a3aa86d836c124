// What a rank tells rank 0 in a heartbeat.
#pragma once

#include <string>
#include <tuple>

#include "core/slowness/step_timer.h"
#include "core/values/fields.h"
#include "core/watch/activity.h"

namespace horovod_partial {

// What the machine does to a rank's process, in recent seconds. A value below 0 is unknown.
struct MachineSigns {
  double processors = -1;  // the processor time that the process uses, in processors
  double stolen = -1;      // the share of the machine's processor time that its hypervisor gives to others
  double throttled = -1;   // the share of scheduling periods in which the process's cgroup is throttled
  double pressure = -1;    // the share of the time in which some process waits for a processor

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("processors", self.processors), Named("stolen", self.stolen),
                           Named("throttled", self.throttled), Named("pressure", self.pressure));
  }
  bool operator==(const MachineSigns& other) const { return Fields(*this) == Fields(other); }
};

struct Beat {
  Activity activity;
  StepReport steps;
  MachineSigns signs;

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("activity", self.activity), Named("steps", self.steps), Named("signs", self.signs));
  }
  bool operator==(const Beat& other) const { return Fields(*this) == Fields(other); }
};

std::string Encode(const Beat& beat);
// Throws std::runtime_error if the bytes do not encode what a rank tells.
Beat DecodeBeat(const std::string& bytes);

}  // namespace horovod_partial
