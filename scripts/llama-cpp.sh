# Sourced by benchmarks: builds programs of llama.cpp from the source package of llama-cpp-python, its Python binding, once
# a folder. Sets LLAMA_CPP_BIN to the folder of the programs, unless it names one already.
#
# usage: llama_cpp FOLDER PROGRAM...

export LLAMA_CPP_VERSION=0.3.36

llama_cpp() {
  local folder=$1 program
  shift
  [ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
  if [ -z "${LLAMA_CPP_BIN:-}" ]; then
    LLAMA_CPP_BIN=$folder/llama.cpp/bin
    for program in "$@"; do
      [ -x "$LLAMA_CPP_BIN/$program" ] || { build_llama_cpp "$folder" "$@"; break; }
    done
  fi
  LLAMA_CPP_BIN=$(realpath "$LLAMA_CPP_BIN")
  export LLAMA_CPP_BIN
}

build_llama_cpp() {
  local folder=$1 source=$1/llama_cpp_python-$LLAMA_CPP_VERSION
  shift
  if [ ! -d "$source" ]; then
    "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-binary llama-cpp-python --no-deps \
      --dest "$folder" "llama-cpp-python==$LLAMA_CPP_VERSION" >&2
    tar -xzf "$source.tar.gz" -C "$folder"
  fi
  if ! command -v cmake > /dev/null; then
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check cmake >&2
    PATH=$(realpath "$folder")/venv/bin:$PATH
  fi
  cmake -S "$source/vendor/llama.cpp" -B "$folder/llama.cpp" \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TOOLS=ON >&2
  cmake --build "$folder/llama.cpp" --config Release --parallel "$(nproc)" --target "$@" >&2
}
