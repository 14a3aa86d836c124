// What is recorded, and what becomes of it on the disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "recording/recorder.h"
#include "recording/segments.h"
#include "recording/table.h"

namespace horovod_partial::recording {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::Ge;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Lt;
using testing::Not;
using testing::SizeIs;
using testing::StartsWith;
using testing::ThrowsMessage;

Time Now() { return std::chrono::steady_clock::now().time_since_epoch(); }

class FilesTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "recorder.XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::vector<std::string> Names(const std::string& below = "") const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ + below))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

  std::string folder_;
};

TEST(TableTest, IsOneLineOfColumns) {
  Table table("rounds", {"round", "reason", "missing"});
  EXPECT_EQ(table.TakeLine(), "");
  table.Add(std::int64_t{3}, std::string("by \"name\"\n\\"), Members{1, 2});
  table.Add(std::int64_t{-4}, std::string("quorum"), Members{});
  EXPECT_EQ(table.TakeLine(),
            "{\"table\":\"rounds\",\"round\":[3,-4],\"reason\":[\"by \\\"name\\\"\\u000a\\\\\",\"quorum\"],"
            "\"missing\":[[1,2],[]]}\n");
  EXPECT_EQ(table.TakeLine(), "") << "a row is taken once";
}

TEST_F(FilesTest, SegmentsAreBoundedAndEachBeginsWithThePreamble) {
  const auto preamble = [](int segment) { return "segment " + std::to_string(segment) + "\n"; };
  const std::string line(99, 'x');
  {
    Segments segments(folder_ + "/a/b", "rank-3", 4 * 300, preamble);
    for (int i = 0; i < 20; ++i) segments.Write(line + "\n");
  }
  const auto names = Names("/a/b");
  EXPECT_THAT(names, SizeIs(Segments::kSegments));
  EXPECT_EQ(names.back(), "rank-3.0009.jsonl");
  for (const auto& name : names) {
    const std::string text = Read(folder_ + "/a/b/" + name);
    EXPECT_THAT(text, StartsWith("segment " + std::to_string(std::stoi(name.substr(7, 4))) + "\n"));
    EXPECT_LE(text.size(), 300U);
  }
}

TEST_F(FilesTest, WhatCannotBeWrittenIsAnError) {
  const auto preamble = [](int) { return "segment\n"; };
  std::ofstream(folder_ + "/file") << "no folder";
  EXPECT_THAT([&] { Segments(folder_ + "/file/run", "rank-0", 4000, preamble); },
              ThrowsMessage<std::runtime_error>(HasSubstr("cannot make the folder")));
  const Segments first(folder_, "rank-0", 4000, preamble);
  EXPECT_THAT([&] { Segments(folder_, "rank-0", 4000, preamble); },
              ThrowsMessage<std::runtime_error>(HasSubstr("rank-0.0000.jsonl")));
}

class RecorderTest : public FilesTest {
 protected:
  static constexpr std::size_t kPlenty = 1 << 30;
  static constexpr std::int64_t kRun = 1'764'000'000'123;  // 24 November 2025, 16:00 UTC

  RecorderTest() { recorder_.SetRun(kRun); }
  std::string Text(int segment = 0) const {
    return Read(folder_ + "/20251124T160000.123Z/rank-2.000" + std::to_string(segment) + ".jsonl");
  }
  BucketLabel Label() const { return {0, name_, policy_, 4096}; }
  // An arrival that has its result 2 ms later.
  void TakeStep(Time time) {
    recorder_.Arrived(Label(), time);
    recorder_.Got(Label(), time + 2ms, 7, false, 0);
  }

  std::vector<std::string> complaints_;
  Recorder recorder_{2, 4, [this](const std::string& text) { complaints_.push_back(text); }};
  const std::string name_ = "gradients";
  const std::string policy_ = "Solo()";
};

TEST_F(RecorderTest, WritesEachTable) {
  recorder_.Arrived(Label(), Now());  // before the recording
  recorder_.Begin(folder_, kPlenty);
  EXPECT_TRUE(recorder_.on());
  const Time begin = Now();
  const std::vector<std::string> names{"w", "b"};
  TakeStep(begin);
  recorder_.Arrived({0, "horovod_partial.replicas", policy_, 1 << 20}, begin + 3ms);
  recorder_.Waited(begin + 1ms, begin + 3ms, false);
  recorder_.Marked({Mark::kOptimizer, begin + 3100us, begin + 3100us, false});
  recorder_.Marked({5, begin + 3300us, begin + 3600us, true});
  recorder_.Arrived(Label(), begin + 4ms);
  recorder_.Got(Label(), begin + 6ms, 8, true, 3);
  recorder_.Waited(begin + 4ms, begin + 7ms, true);
  recorder_.Marked({5, begin + 7ms, begin + 8ms, true});
  recorder_.Handed(begin + 1ms);
  recorder_.Reduced({11, 0, &names, begin + 4ms, begin + 5ms, 800, true});
  recorder_.Reduced({12, 0, nullptr, begin + 5ms, begin + 6ms, 4096, false});
  Closing closing;
  closing.round = 7;
  closing.contributions = {{}, {3, true}, {1, true}, {1}};
  recorder_.Decided(Label(), closing, 1, begin);
  recorder_.End();
  EXPECT_FALSE(recorder_.on());
  EXPECT_THAT(
      Text(),
      AllOf(StartsWith(
                "{\"format\":\"horovod_partial.recording\",\"version\":2,\"run\":\"20251124T160000.123Z\",\"rank\":2,"
                "\"size\":4,\"host\":\""),
            HasSubstr("{\"table\":\"buckets\",\"bucket\":[0],\"name\":[\"gradients\"],\"policy\":[\"Solo()\"],"
                      "\"process_set\":[0],\"bytes\":[4096]}\n"),
            HasSubstr("{\"table\":\"steps\",\"bucket\":[-1,0,0],\"step\":[0,0,1],\"begin\":[-1,-1,"),
            HasSubstr("\"blocked\":[0,0,1000],\"reduced\":[1000,0,2000],\"round\":[-1,7,8],\"late\":[0,0,1],"
                      "\"staleness\":[0,0,3],\"bytes\":[800,4096,4096],\"loader\":[-1,-1,300],\"forward\":[-1,-1,400],"
                      "\"backward\":[-1,-1,0],\"optimizer\":[-1,-1,100],\"other\":[-1,-1,200]}\n"),
            HasSubstr("{\"table\":\"waits\",\"begin\":["),
            HasSubstr("{\"table\":\"reductions\",\"sequence\":[11,12],\"process_set\":[0,0],\"end\":["),
            HasSubstr("\"everyone\":[1,0]}\n"),
            HasSubstr(
                "\"reason\":[\"quorum\"],\"quorum\":[1],\"gradients\":[5],\"missing\":[[0,3]],\"delivered\":[[3]]}\n"),
            HasSubstr("{\"table\":\"end\",\"time\":[")));
  EXPECT_THAT(complaints_, IsEmpty());
}

// A thread that uses 200 ms of a processor's time, and ends when it is told to.
class Worker {
 public:
  template <class First>
  explicit Worker(First first)
      : thread_([this, first] {
          first();
          timespec used{};
          while (used.tv_sec == 0 && used.tv_nsec < 200'000'000) clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
          done_.set_value();
          end_.get_future().wait();
        }) {
    done_.get_future().wait();
  }
  void End() {
    end_.set_value();
    thread_.join();
  }

 private:
  std::promise<void> done_, end_;
  std::thread thread_;  // the last member, because it uses the others
};

class ProcessorTimeTest : public RecorderTest {
 protected:
  void SetUp() override {
    RecorderTest::SetUp();
    if (!std::ifstream("/proc/self/task/" + std::to_string(getpid()) + "/schedstat"))
      GTEST_SKIP() << "this Linux does not tell for how long threads wait for a processor";
  }
  // For how long threads ran during the recording, in microseconds.
  std::int64_t Ran() const {
    std::vector<std::int64_t> ran;
    std::istringstream lines(Text());
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("{\"table\":\"processor\"", 0) != 0) continue;
      std::istringstream numbers(line.substr(line.find("\"ran\":[") + 7));
      char separator = ',';
      for (std::int64_t number; separator == ',' && numbers >> number >> separator;) ran.push_back(number);
    }
    EXPECT_GE(ran.size(), 2U);
    return ran.back() - ran.front();
  }
};

TEST_F(ProcessorTimeTest, IsThatOfAllThreads) {
  recorder_.Begin(folder_, kPlenty);
  Worker worker([] {});
  recorder_.End();
  worker.End();
  EXPECT_GE(Ran(), 200'000);
}

TEST_F(ProcessorTimeTest, OfAThreadThatEndsStaysInTheSum) {
  Worker worker([] {});
  Worker lasting([] {});
  recorder_.Begin(folder_, kPlenty);
  worker.End();
  recorder_.End();
  lasting.End();
  EXPECT_THAT(Ran(), AllOf(Ge(0), Lt(200'000)));
}

TEST_F(ProcessorTimeTest, OfHorovodsThreadDoesNotCount) {
  recorder_.Begin(folder_, kPlenty);
  Worker worker([this] { recorder_.Reduced({0, 0, nullptr, Now(), Now(), 8, true}); });
  recorder_.End();
  worker.End();
  EXPECT_LT(Ran(), 200'000);
}

TEST_F(RecorderTest, ReportsAreOfTheStepsWithMostBytes) {
  recorder_.Watch(true);
  const std::vector<std::string> names{"loss"};
  const std::string shared = "WorkSharing(), backward_passes_per_step=2";
  for (int step = 0; step < 4; ++step) {
    const Time time = std::chrono::milliseconds(10 * step);
    for (const auto& [name, bytes] : std::map<std::string, std::size_t>{{"a.0", 100}, {"b.0", 90}}) {
      recorder_.Arrived({0, name, shared, bytes}, name == "a.0" ? time : 2 * time);
      recorder_.Got({0, name, shared, bytes}, 2 * time, step, false, 0);
    }
    recorder_.Handed(time);
    recorder_.Reduced({step, 0, &names, time, time, 8, true});
  }
  const StepReport report = recorder_.TakeSteps();
  EXPECT_EQ(report.bytes, 4 * 198);
  ASSERT_EQ(report.ended.size(), 1U);
  EXPECT_DOUBLE_EQ(report.ended[0].seconds, 0.010) << "not the steps of the other optimizer";
  EXPECT_DOUBLE_EQ(report.seconds, 0.020);
  EXPECT_EQ(recorder_.TakeSteps(), StepReport());
}

TEST_F(RecorderTest, AWatchThatBeginsAnewDoesNotTimeThePause) {
  for (const Time begin : {0ms, 1000ms}) {
    recorder_.Watch(true);
    for (int step = 0; step < 4; ++step) TakeStep(begin + std::chrono::milliseconds(10 * step));
    const auto ended = recorder_.TakeSteps().ended;
    ASSERT_THAT(ended, SizeIs(1));
    EXPECT_DOUBLE_EQ(ended[0].seconds, 0.008);
    recorder_.Watch(false);
  }
}

// A TCP connection to 127.0.0.1 that has carried so many bytes. It comes from 127.0.0.1 plus `host`.
class Carrier {
 public:
  Carrier(std::uint32_t host, std::size_t bytes) {
    const int listener = Bound(0);
    sockaddr_in address{};
    socklen_t length = sizeof address;
    EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    from_ = Bound(host);
    EXPECT_EQ(connect(from_, reinterpret_cast<sockaddr*>(&address), length), 0);
    to_ = accept(listener, nullptr, nullptr);
    close(listener);
    std::string part(10'000, 'x');
    for (; bytes > 0; bytes -= part.size()) {
      EXPECT_EQ(send(from_, part.data(), part.size(), 0), static_cast<ssize_t>(part.size()));
      EXPECT_EQ(recv(to_, part.data(), part.size(), MSG_WAITALL), static_cast<ssize_t>(part.size()));
    }
    for (int left = 1; left > 0; std::this_thread::sleep_for(1ms)) EXPECT_EQ(ioctl(from_, SIOCOUTQ, &left), 0);
  }
  ~Carrier() {
    close(from_);
    close(to_);
  }

 private:
  static int Bound(std::uint32_t host) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK + host);
    const int number = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(bind(number, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return number;
  }

  int from_, to_;
};

TEST_F(RecorderTest, LinksAreConnectionsWithOtherAddressesThatHaveCarriedMuch) {
  const Carrier within(0, 2'000'000), little(1, 800'000), much(1, 1'500'000), less(1, 700'000), other(2, 900'000);
  recorder_.Begin(folder_, kPlenty);
  for (int i = 0; i < 1000 && Text().find("\"links\"") == std::string::npos; ++i) std::this_thread::sleep_for(10ms);
  recorder_.End();                                                                              // looks again
  const std::string row = "\"from\":[\"127.0.0.2\"],\"to\":[\"127.0.0.1\"],\"bytes\":[150000";  // a SYN may count
  const std::string text = Text();
  EXPECT_THAT(text, HasSubstr(row));
  EXPECT_EQ(text.find("\"links\""), text.rfind("\"links\"")) << "nothing has been carried since the first row";
  EXPECT_THAT(text, AllOf(Not(HasSubstr("127.0.0.3")), Not(HasSubstr("\"from\":[\"127.0.0.1\""))));
}

TEST_F(RecorderTest, EachSegmentKnowsTheBuckets) {
  recorder_.Begin(folder_, 4000);
  while (Names("/20251124T160000.123Z").size() < 2) {
    TakeStep(Now());
    std::this_thread::sleep_for(1ms);
  }
  recorder_.End();
  EXPECT_THAT(Text(1), HasSubstr("\"name\":[\"gradients\"]"));
  EXPECT_THAT(Text(1), HasSubstr("\"segment\":1"));
}

TEST_F(RecorderTest, BeginsOnceAtATime) {
  recorder_.Begin(folder_, kPlenty);
  EXPECT_THAT([&] { recorder_.Begin(folder_, kPlenty); },
              ThrowsMessage<std::runtime_error>(HasSubstr("being recorded already")));
  recorder_.End();
  recorder_.End();
}

TEST_F(RecorderTest, AFullDiskEndsTheRecordingWithAWord) {
  recorder_.Begin(folder_, 4);  // each line needs a segment of its own
  std::filesystem::remove_all(folder_);
  recorder_.Waited(Now(), Now(), false);
  recorder_.End();
  ASSERT_THAT(complaints_, SizeIs(1));
  EXPECT_THAT(complaints_[0], HasSubstr("the recording has ended: cannot write"));
}

TEST_F(RecorderTest, AKilledProcessLeavesWholeLines) {
  const pid_t child = fork();
  if (child == 0) {
    recorder_.Begin(folder_, kPlenty);
    for (;;) TakeStep(Now());
  }
  std::string text;
  while (std::count(text.begin(), text.end(), '\n') < 3) {
    std::this_thread::sleep_for(20ms);
    std::ostringstream read;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_))
      if (entry.is_regular_file()) read << std::ifstream(entry.path()).rdbuf();
    text = read.str();
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_THAT(Text(), AllOf(HasSubstr("{\"table\":\"steps\""), Not(HasSubstr("\"table\":\"end\""))));
}

TEST_F(RecorderTest, AForkedChildLeavesTheFilesAlone) {
  recorder_.Begin(folder_, kPlenty);
  TakeStep(Now());
  const pid_t child = fork();
  if (child == 0) {
    recorder_.End();
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  recorder_.End();
  EXPECT_THAT(Text(), HasSubstr("{\"table\":\"steps\",\"bucket\":[0],"));
}

TEST_F(RecorderTest, ThreadsTellItWhatTheySeeWhileItEnds) {
  recorder_.Begin(folder_, kPlenty);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      while (!over) recorder_.Arrived(Label(), Now());
    });
  std::this_thread::sleep_for(50ms);
  recorder_.End();
  over = true;
  for (auto& thread : threads) thread.join();
  const std::string text = Text();
  EXPECT_EQ(text.back(), '\n');
  EXPECT_THAT(text, HasSubstr("\"table\":\"end\""));
}

}  // namespace
}  // namespace horovod_partial::recording
