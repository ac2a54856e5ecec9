// Some chat templates write today's date into each conversation. A run records the day of its first start and
// always uses that one, so that its data give the same tokens on every day. Reads files only; any thread.
#pragma once

#include <string>

namespace lm {

// Whether the chat template may use the date: the file `own` ("": none), else that of the model's directory.
// False for a template that is too large to be read: it is refused when it is used.
bool template_asks_for_date(const std::string& own, const std::string& model_dir);

}  // namespace lm
