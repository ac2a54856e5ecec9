// Ranks of one run must be of one lmlaunch: what they say to one another has no version of its own.
#pragma once

#include <string>

#include "comm/group.h"

namespace lm {

// The first thing that ranks say. Throws Error(10) on all of them where one is of another version than rank 0.
void agree_on_version(Group& group, const std::string& mine);

}  // namespace lm
