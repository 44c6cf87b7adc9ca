// A libnvrtc.so.12 whose "cubins" are host builds: g++ compiles the source
// after host_cuda.h.
//
// The bytes are an ELF shared library, which the stand-in driver loads as a
// module. Builds are cached by the text of the source, of the headers beside
// it, and of the engine. The real NVRTC compiles the same files in another
// test.
#include <dirent.h>
#include <dlfcn.h>
#include <nvrtc.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

namespace fs = std::filesystem;

struct _nvrtcProgram {
  std::string source, name, log, cubin;
};

namespace {

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The folder of this library, which holds the engine's object file too.
fs::path folder() {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&nvrtcVersion), &here);
  return fs::canonical(here.dli_fname).parent_path();
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

struct Options {
  std::string flags,
      headers;  // headers: the text of all .cuh files that can be included
};

Options read_options(int count, const char* const* options) {
  Options out;
  auto add_include = [&](const fs::path& path) {
    if (fs::exists(path / "cuda_runtime.h")) return;  // host_cuda.h stands for CUDA's own headers
    out.flags += " -I" + quoted(path);
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.path().extension() == ".cuh") out.headers += contents(entry.path());
  };
  for (int i = 0; i < count; ++i) {
    std::string option = options[i];
    for (const char* start : {"--include-path=", "-I"})
      if (option.starts_with(start)) {
        std::string path = option.substr(strlen(start));
        if (path.empty() && i + 1 < count) path = options[++i];
        add_include(path);
      }
    for (const char* start : {"--define-macro=", "-D"})
      if (option.starts_with(start)) out.flags += " -D" + quoted(option.substr(strlen(start)));
  }
  return out;
}

// Runs g++ with arguments; returns its exit status, and what it prints.
int run_compiler(const std::string& arguments, std::string* printed) {
  const char* compiler = getenv("CXX");
  const std::string command =
      "env -u LD_PRELOAD " + std::string(compiler ? compiler : "g++") + " -std=c++20 " + arguments;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return 1;
  char text[4096];
  while (std::size_t got = fread(text, 1, sizeof text, pipe)) printed->append(text, got);
  return pclose(pipe);
}

// Describes each kernel of a source to the driver. Macros may have made them,
// so it is preprocessed first, without host_cuda.h, which defines `__global__`
// away.
std::string descriptions(const fs::path& source, const std::string& flags) {
  static const std::regex kernel(
      R"re(extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\()re");
  std::string text, described;
  run_compiler(
      "-E -P -x c++ -I" + quoted(folder() / "host") + flags + " " + quoted(source) + " 2>/dev/null",
      &text);
  for (std::sregex_iterator at(text.begin(), text.end(), kernel), end; at != end; ++at)
    described += "HOST_KERNEL(" + at->str(1) + ");\n";
  return described;
}

// What g++ is given to link the engine; under sanitizers it is compiled with
// them, too.
std::string engine() {
  const char* sanitizers = getenv("STANDIN_SANITIZE");
  if (!sanitizers) return "-x none " + quoted(folder() / "host_cuda.o");
  return std::string("-fno-sanitize-recover=all -fsanitize=") + sanitizers + " " +
         quoted(folder() / "host" / "host_cuda.cpp");
}

// Builds a source into a library of host kernels; returns whether that worked.
bool build(const _nvrtcProgram& program, const fs::path& stem, const std::string& flags,
           const fs::path& target, std::string* log) {
  const fs::path plain = stem.string() + ".cu", source = stem.string() + ".cpp";
  std::ofstream(plain) << program.source;
  std::ofstream(source) << "#include \"host_cuda.h\"\n#line 1 \"" << program.name << "\"\n"
                        << program.source << "\n"
                        << descriptions(plain, flags);
  const int status = run_compiler(
      "-O1 -g1 -fPIC -shared -fno-exceptions -ffp-contract=off "
      "-U_FORTIFY_SOURCE"
      " -fvisibility-inlines-hidden -Wno-unknown-pragmas -x c++ -I" +
          quoted(folder() / "host") + flags + " " + quoted(source) + " " + engine() + " -o " +
          quoted(target) + " 2>&1",
      log);
  fs::remove(plain);
  fs::remove(source);
  return status == 0;
}

}  // namespace

extern "C" {

nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 9;
  return NVRTC_SUCCESS;
}

const char* nvrtcGetErrorString(nvrtcResult result) {
  return result == NVRTC_SUCCESS             ? "NVRTC_SUCCESS"
         : result == NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION"
                                             : "NVRTC_ERROR";
}

nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = 4;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  const int all[] = {70, 80, 90, 100};
  memcpy(archs, all, sizeof all);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char* name,
                               int headers, const char* const*, const char* const*) {
  if (headers) return NVRTC_ERROR_INVALID_INPUT;
  *program = new _nvrtcProgram{source, name && *name ? name : "default_program", {}, {}};
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* given) {
  const Options options = read_options(count, given);
  const std::size_t key = std::hash<std::string>{}(
      program->source + options.headers + options.flags + engine() +
      contents(folder() / "host" / "host_cuda.h") + contents(folder() / "host_cuda.o"));
  const fs::path cache = folder().parent_path() / "kernels";
  fs::create_directories(cache);
  char name[40];
  snprintf(name, sizeof name, "%016zx", key);
  const fs::path built = cache / (std::string(name) + ".so");
  if (!fs::exists(built)) {
    const fs::path stem = cache / (std::string(name) + "." + std::to_string(getpid()));
    const fs::path part = stem.string() + ".part";
    if (!build(*program, stem, options.flags, part, &program->log)) return NVRTC_ERROR_COMPILATION;
    fs::rename(part, built);
  }
  program->cubin = contents(built);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* size) {
  *size = program->cubin.size();
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* out) {
  memcpy(out, program->cubin.data(), program->cubin.size());
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, std::size_t* size) {
  *size = program->log.size() + 1;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* out) {
  memcpy(out, program->log.c_str(), program->log.size() + 1);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcAddNameExpression(nvrtcProgram, const char*) { return NVRTC_SUCCESS; }

nvrtcResult nvrtcGetLoweredName(nvrtcProgram, const char* name, const char** lowered) {
  *lowered = name;  // kernels are extern "C"
  return NVRTC_SUCCESS;
}

}  // extern "C"
