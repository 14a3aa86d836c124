// A framework's Horovod library in this process: its functions, and the virtual function tables that it really uses.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace horovod_partial::attach {

// horovod-partial cannot work with this Horovod. If Attach throws this, no slot has been changed.
struct AttachError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library {
 public:
  // `path`: the shared object, which must be loaded already.
  explicit Library(std::string path);

  // Returns a function or object of this library itself, never one of the same name from a library that was loaded
  // earlier.
  void* Symbol(const std::string& mangled) const;
  // The names of the shared libraries that this one is linked with directly.
  std::vector<std::string> Needed() const;
  // Returns the table that objects made by this library point to. If two frameworks' Horovods share a process, this may
  // be the table of the library that was loaded first: the dynamic linker binds the symbol to it.
  void** VirtualTable(const std::string& class_name) const;

 private:
  std::string path_;
  void* handle_;
};

// One slot of a virtual function table. It is found by the function that it holds, and never by its index.
class Slot {
 public:
  // Throws AttachError if no slot of the class's table holds `method` (mangled, without the class) or `hook`. A slot
  // holds the hook already if another framework's Horovod shares the table and has been attached before.
  Slot(const Library& library, const std::string& class_name, const std::string& method, const void* hook);

  void* original() const { return original_; }
  const void* table() const { return table_; }  // the address that objects of the class hold
  // Tables lie in memory that is read-only after loading (RELRO), and one page holds many slots. So first make all
  // slots writable, which may throw AttachError; then set all; then seal all.
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
