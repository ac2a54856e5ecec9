// page.html, compiled in (page.cmake).
#pragma once

namespace lm {

extern const char* const kReportPage;

}  // namespace lm
