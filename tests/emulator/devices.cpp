// libemulator_devices.so, for LD_PRELOAD: whoever lists the directory /dev finds nvidia0, nvidia1, ... at its
// end, one for each of the emulator's cards. The names are all there is: they cannot be opened, and nothing
// else changes. (A private /dev by a mount namespace would need root.)
#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>

#include "tests/emulator/settings.h"

namespace {

struct Listing {
  size_t shown = 0;  // cards so far
  dirent entry{};    // readdir's answer, which belongs to the directory's stream
};

std::mutex mutex;  // guards the listings
std::map<DIR*, Listing>& listings() {
  static std::map<DIR*, Listing> all;
  return all;
}

bool is_dev(DIR* directory) {
  struct stat listed {
  }, dev{};
  return fstat(dirfd(directory), &listed) == 0 && stat("/dev", &dev) == 0 && listed.st_dev == dev.st_dev &&
         listed.st_ino == dev.st_ino;
}

// What follows the last true entry.
dirent* next_card(DIR* directory) {
  const int before = errno;  // readdir leaves it alone at the end
  if (!is_dev(directory)) return errno = before, nullptr;
  const std::lock_guard lock(mutex);
  Listing& listing = listings()[directory];
  if (listing.shown == emulator::cards().size()) return errno = before, nullptr;
  std::snprintf(listing.entry.d_name, sizeof listing.entry.d_name, "nvidia%zu", listing.shown++);
  listing.entry.d_ino = 1;
  listing.entry.d_type = DT_CHR;
  listing.entry.d_reclen = sizeof listing.entry;
  return &listing.entry;
}

template <class Function>
Function next(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

dirent* readdir(DIR* directory) {
  static const auto real = next(&readdir, "readdir");
  dirent* entry = real(directory);
  return entry != nullptr ? entry : next_card(directory);
}
int closedir(DIR* directory) {
  static const auto real = next(&closedir, "closedir");
  {
    const std::lock_guard lock(mutex);
    listings().erase(directory);
  }
  return real(directory);
}
}
