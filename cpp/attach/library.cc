#include "attach/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace horovod_partial::attach {
namespace {

const char* const kRemedy =
    "; reinstall horovod-partial against this Horovod: pip install --force-reinstall --no-deps, "
    "from its source";

std::string Scope(const std::string& class_name) {
  return "N7horovod6common" + std::to_string(class_name.size()) + class_name;
}

const ElfW(Dyn) * FindDynamic(const link_map* map, ElfW(Sxword) tag) {
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry)
    if (entry->d_tag == tag) return entry;
  return nullptr;
}

}  // namespace

Library::Library(std::string path) : path_(std::move(path)), handle_(dlopen(path_.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
  if (handle_ == nullptr) throw AttachError("Horovod's library " + path_ + " is not loaded");
}

void* Library::Symbol(const std::string& mangled) const {
  void* symbol = dlsym(handle_, mangled.c_str());
  if (symbol == nullptr) throw AttachError("Horovod's library " + path_ + " does not export " + mangled + kRemedy);
  return symbol;
}

std::vector<std::string> Library::Needed() const {
  std::vector<std::string> names;
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return names;
  const auto* strings = FindDynamic(map, DT_STRTAB);
  for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry)
    if (entry->d_tag == DT_NEEDED)
      names.push_back(reinterpret_cast<const char*>(strings->d_un.d_ptr) + entry->d_un.d_val);
  return names;
}

void** Library::VirtualTable(const std::string& class_name) const {
  const std::string name = "_ZTV" + Scope(class_name) + "E";
  // The address of the virtual table is first looked up in the library's global offset table, where the library's
  // constructors read it.
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) {
    const auto* relocations = FindDynamic(map, DT_RELA);
    const auto* size = FindDynamic(map, DT_RELASZ);
    const auto* symbols = FindDynamic(map, DT_SYMTAB);
    const auto* strings = FindDynamic(map, DT_STRTAB);
    if (relocations != nullptr && size != nullptr && symbols != nullptr && strings != nullptr) {
      const auto* rela = reinterpret_cast<const ElfW(Rela)*>(relocations->d_un.d_ptr);
      const auto* symtab = reinterpret_cast<const ElfW(Sym)*>(symbols->d_un.d_ptr);
      const auto* strtab = reinterpret_cast<const char*>(strings->d_un.d_ptr);
      for (std::size_t i = 0; i < size->d_un.d_val / sizeof *rela; ++i) {
        const auto symbol = ELF64_R_SYM(rela[i].r_info);
        if (rela[i].r_addend != 0 || name != strtab + symtab[symbol].st_name) continue;
        return *reinterpret_cast<void***>(map->l_addr + rela[i].r_offset);
      }
    }
  }
  return static_cast<void**>(Symbol(name));
}

Slot::Slot(const Library& library, const std::string& class_name, const std::string& method, void* hook) : hook_(hook) {
  constexpr std::size_t kFirstFunction = 2;  // a virtual table has an offset and type information before its functions
  void** table = library.VirtualTable(class_name);
  table_ = table + kFirstFunction;
  // A virtual table may lie in another library, and then holds functions of that library. So look up `method` there.
  Dl_info owner;
  void* symbol = nullptr;  // the symbol of the table, which tells how long the table is
  if (dladdr1(table, &owner, &symbol, RTLD_DL_SYMENT) == 0 || owner.dli_fname == nullptr || symbol == nullptr)
    throw AttachError("cannot tell which library holds the virtual table of " + class_name);
  const Library holder(owner.dli_fname);
  original_ = holder.Symbol("_Z" + Scope(class_name) + method);
  const std::size_t entries = static_cast<ElfW(Sym)*>(symbol)->st_size / sizeof(void*);
  for (std::size_t i = kFirstFunction; i < entries; ++i) {
    if (table[i] != original_ && table[i] != hook) continue;
    address_ = table + i;
    return;
  }
  throw AttachError("no virtual function of Horovod's " + class_name + " is " + method +
                    " (is another plugin attached?)" + kRemedy);
}

int Slot::Protect(int protection) const {
  const auto page_size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(address_);
  return mprotect(reinterpret_cast<void*>(address / page_size * page_size), page_size, protection);
}

void Slot::MakeWritable() const {
  if (Protect(PROT_READ | PROT_WRITE) != 0)
    throw AttachError(std::string("Horovod's virtual tables cannot be written: ") + std::strerror(errno));
}

void Slot::Set() const { __atomic_store_n(address_, hook_, __ATOMIC_SEQ_CST); }

void Slot::Seal() const { Protect(PROT_READ); }

}  // namespace horovod_partial::attach
