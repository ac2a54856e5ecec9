# Writes OUT, a C++ file with the text of page.html, so that a report needs no files.
#   cmake -DOUT=page_text.cpp -DFILE=page.html -P page.cmake
file(READ ${FILE} text)
file(WRITE ${OUT}
"#include \"launcher/report/page.h\"

namespace lm {

const char* const kReportPage = R\"page(${text})page\";

}  // namespace lm
")
