#include "names.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <vector>

namespace emulator::simt {
namespace {

// Kernels are local to their files, so the dynamic linker does not know them: the program's own table does,
// which lists the symbols of a file behind the file's name.
class Symbols {
 public:
  Symbols() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::vector<char> image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (image.size() < sizeof(ElfW(Ehdr))) return;
    const auto* const header = reinterpret_cast<const ElfW(Ehdr)*>(image.data());
    const auto* const sections = reinterpret_cast<const ElfW(Shdr)*>(image.data() + header->e_shoff);
    for (int s = 0; s < header->e_shnum; ++s) {
      if (sections[s].sh_type != SHT_SYMTAB) continue;
      const char* const text = image.data() + sections[sections[s].sh_link].sh_offset;
      const auto* const first = reinterpret_cast<const ElfW(Sym)*>(image.data() + sections[s].sh_offset);
      std::string source;
      for (size_t i = 0; i < sections[s].sh_size / sizeof *first; ++i) {
        const int type = ELF64_ST_TYPE(first[i].st_info);
        if (type == STT_FILE) source = text + first[i].st_name;
        if (type == STT_FUNC) names_[first[i].st_value] = source + " " + readable(text + first[i].st_name);
      }
    }
  }

  std::string operator[](uintptr_t address) const {
    const auto it = names_.find(address);
    return it == names_.end() ? "" : it->second;
  }

 private:
  // "void lm::gpu::(anonymous namespace)::rotate<lm::Bf16, 8, false>(lm::Rope)" -> "rotate<Bf16, 8, false>"
  static std::string readable(const char* mangled) {
    int status = 0;
    const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                      std::free);
    std::string name = status == 0 ? text.get() : mangled;
    for (const char* noise : {"(anonymous namespace)::", "lm::gpu::", "lm::", "void "}) {
      for (size_t at; (at = name.find(noise)) != std::string::npos;) name.erase(at, std::strlen(noise));
    }
    // Up to the parameters: the parenthesis that is in no angle brackets.
    size_t depth = 0, end = 0;
    while (end < name.size() && (depth > 0 || name[end] != '(')) {
      depth += name[end] == '<';
      depth -= name[end] == '>' && depth > 0;
      ++end;
    }
    return name.substr(0, end);
  }

  std::map<uintptr_t, std::string> names_;
};

uintptr_t load_address() {
  uintptr_t base = 0;  // the program is the first object
  dl_iterate_phdr([](dl_phdr_info* info, size_t,
                     void* out) { return *static_cast<uintptr_t*>(out) = info->dlpi_addr, 1; },
                  &base);
  return base;
}

}  // namespace

std::string kernel_name(const void* kernel) {
  static const Symbols symbols;
  static const uintptr_t base = load_address();
  const auto address = reinterpret_cast<uintptr_t>(kernel);
  const std::string name = symbols[address - base];
  return name.empty() ? "kernel at " + std::to_string(address - base) : name;
}

}  // namespace emulator::simt
