#include <dlfcn.h>

#include "base/error.h"
#include "comm/mpi_api.h"

namespace lm {
namespace {

constexpr char kInstall[] =
    "install Open MPI on every machine (Debian: openmpi-bin, libopenmpi-dev), then ./dev build";

Error cannot_load(const std::string& plugin, const std::string& why) {
  return Error(Exit::kDoesNotFit, {.area = "MPI-34",
                                   .what = "Open MPI cannot be loaded, which an MPI job needs: " + why,
                                   .place = plugin,
                                   .next = kInstall});
}

template <class Function>
Function* symbol(const std::string& plugin, const char* name) {
  if (plugin.empty()) throw cannot_load(plugin, "lmlaunch was built without it");
  // Open MPI's own plugins look for its symbols among the global ones.
  void* const library = dlopen(plugin.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* const address = library == nullptr ? nullptr : dlsym(library, name);
  if (address == nullptr) throw cannot_load(plugin, dlerror());
  return reinterpret_cast<Function*>(address);
}

}  // namespace

const MpiApi& load_mpi(const std::string& plugin) {
  return *symbol<const MpiApi*()>(plugin, kMpiApiSymbol)();
}

std::string mpi_version(const std::string& plugin) {
  char text[512] = "";
  symbol<void(char*, int)>(plugin, kMpiVersionSymbol)(text, sizeof text);
  const std::string all = text;
  return all.substr(0, all.find(','));
}

}  // namespace lm
