// Some chat templates write today's date into each conversation. A run records the day on which it was begun
// and tells them that one, so that its data give the same tokens on every day. Reads files only; any thread.
#pragma once

#include <string>

namespace lm {

// Whether the chat template that is used may ask for the date: the file `own` ("": none), else that of the
// model's directory. A template that is too large to be read asks for nothing: it is refused where it is
// used.
bool template_asks_for_date(const std::string& own, const std::string& model_dir);

}  // namespace lm
