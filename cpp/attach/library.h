// A framework's Horovod library in this process: its functions, and the virtual function tables that it really uses.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace horovod_partial::attach {

// Thrown if horovod-partial cannot work with this Horovod, or if the ranks run different versions of horovod-partial.
struct AttachError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Library {
 public:
  // `path` names the shared object, which must be loaded already.
  explicit Library(std::string path);

  // Returns a function or object of this library, never one of the same name from a library that was loaded earlier.
  void* Symbol(const std::string& mangled) const;
  // Returns the names of the shared libraries that this library is linked with directly.
  std::vector<std::string> Needed() const;
  // Returns the virtual table that objects made by this library point to. If two frameworks' Horovods share a process,
  // this may be the table of the library that was loaded first, because the dynamic linker binds both to one table.
  void** VirtualTable(const std::string& class_name) const;

 private:
  std::string path_;
  void* handle_;
};

// One slot of a virtual function table. The slot is found by the function that it holds, never by its index.
class Slot {
 public:
  // Throws AttachError if no slot of the class's table holds `method` (mangled, without the class) or `hook`. A slot
  // holds the hook already if another framework's Horovod shares the table and has been attached before.
  Slot(const Library& library, const std::string& class_name, const std::string& method, void* hook);

  void* hook() const { return hook_; }
  void* original() const { return original_; }
  const void* table() const { return table_; }  // the address of the table, as it stands in objects of the class
  // Virtual tables lie in memory that is read-only after loading (RELRO), and one page holds many slots. So first call
  // MakeWritable for all slots, then Set for all, then Seal for all. Only MakeWritable may throw (AttachError).
  void MakeWritable() const;
  void Set() const;  // puts the hook into the slot
  void Seal() const;

 private:
  int Protect(int protection) const;

  void* const hook_;
  const void* table_ = nullptr;
  void** address_ = nullptr;
  void* original_ = nullptr;
};

}  // namespace horovod_partial::attach
