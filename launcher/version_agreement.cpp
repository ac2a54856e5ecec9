#include "launcher/version_agreement.h"

#include <fmt/format.h>

#include "base/error.h"

namespace lm {

void agree_on_version(Group& group, const std::string& mine) {
  struct Version {
    char text[64] = "";
  };
  Version own;
  mine.copy(own.text, sizeof own.text - 1);
  const std::vector<Version> all = group.gather("lmlaunch's version", own);
  for (size_t r = 1; r < all.size(); ++r) {
    const std::string first = all.front().text, other = all[r].text;
    if (other == first) continue;
    throw Error(Exit::kConfig, {.area = "RANK-32",
                                .what = fmt::format("rank {} is lmlaunch {}, and rank 0 is lmlaunch {}", r,
                                                    other, first),
                                .place = "",
                                .next = "install the same lmlaunch on all machines"});
  }
}

}  // namespace lm
