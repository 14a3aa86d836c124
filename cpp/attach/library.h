// A framework's Horovod library in this process: its functions, and the virtual function tables that it really uses.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace horovod_partial::attach {

// The installed Horovod is not what this build was made for. Nothing has been changed.
struct AttachError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library {
 public:
  // `path`: the shared object, which must be loaded already.
  explicit Library(std::string path);

  // The function or object of this very library, never one of the same name that was loaded earlier.
  void* Symbol(const std::string& mangled) const;
  // The names of the shared libraries that this one is linked with, without those that they are linked with in turn.
  std::vector<std::string> Needed() const;
  // The table that objects made by this library point to. Where two frameworks' Horovods share a process, the second
  // one's objects use the first one's tables: the dynamic linker has bound them so.
  void** VirtualTable(const std::string& class_name) const;

 private:
  std::string path_;
  void* handle_;
};

// One slot of a virtual function table, found by the function that it holds and never by its index.
class Slot {
 public:
  // Throws AttachError if no slot of the class's table holds `method` (mangled, without the class), or `hook` instead:
  // where another framework's Horovod shares the table, it has been attached already.
  Slot(const Library& library, const std::string& class_name, const std::string& method, const void* hook);

  void* original() const { return original_; }
  const void* table() const { return table_; }  // as objects of the class point to it
  // Tables lie in memory that is made read-only after loading (RELRO), many slots in one page: make it writable for all
  // of them, which may throw AttachError, then set them, then seal it again.
  void MakeWritable() const;
  void Set(void* function) const;
  void Seal() const;

 private:
  int Protect(int protection) const;

  const void* table_ = nullptr;
  void** address_ = nullptr;
  void* original_ = nullptr;
};

}  // namespace horovod_partial::attach
