//! Environment variables: the only module that reads them. `powerinfer-hub` and the planner ask for those of the Hugging Face
//! Hub and of CUDA by name.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// `POWERINFER_ISA`: the instruction set to use instead of the fastest one (`scalar`, `avx2`, `avx512`,
/// `avx512-vnni` or `neon`).
pub fn isa() -> Option<OsString> {
    variable("POWERINFER_ISA")
}

/// `POWERINFER_PTX_DIR`: a folder whose `NAME.cubin` or `NAME.ptx` replace the embedded CUDA kernels.
pub fn ptx_folder() -> Option<PathBuf> {
    variable("POWERINFER_PTX_DIR").map(PathBuf::from)
}

/// `POWERINFER_CACHE`: the folder of what is measured once per machine, instead of `powerinfer` in `XDG_CACHE_HOME` or
/// `~/.cache`; `None` if there is no home folder either.
pub fn cache_folder() -> Option<PathBuf> {
    cache_folder_in(variable)
}

/// The cache folder in an environment whose variables have the values that `set` returns. Relative paths in `XDG_CACHE_HOME` and
/// `HOME` are ignored, as the XDG specification says.
fn cache_folder_in(set: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name| {
        set(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = || Some(absolute("HOME")?.join(".cache"));
    set("POWERINFER_CACHE").map(PathBuf::from).or_else(|| {
        let parent = absolute("XDG_CACHE_HOME").or_else(cache)?;
        Some(parent.join("powerinfer"))
    })
}

/// `POWERINFER_REQUIRE_GPU`: whether a missing GPU is an error instead of a fallback to the CPU.
pub fn requires_gpu() -> bool {
    variable("POWERINFER_REQUIRE_GPU").is_some()
}

/// `POWERINFER_TEST_DEVICE=gpu`: whether tests of CUDA kernels run on a GPU instead of the emulator.
pub fn tests_on_gpu() -> bool {
    variable("POWERINFER_TEST_DEVICE").is_some_and(|device| device == OsStr::new("gpu"))
}

/// `POWERINFER_SKIP_EMULATOR`: whether tests that need the emulator are skipped if it was not built.
pub fn skips_emulator() -> bool {
    variable("POWERINFER_SKIP_EMULATOR").is_some()
}

/// Value of a variable; `None` if it is not set or empty.
pub fn variable(variable: &str) -> Option<OsString> {
    value(variable).filter(|value| !value.is_empty())
}

/// Value of a variable, which may be empty; `None` if it is not set.
pub fn value(variable: &str) -> Option<OsString> {
    env::var_os(variable)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn relative_base_folders_are_ignored() {
        let folder = |variables: &[(&str, &str)]| {
            cache_folder_in(|name| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| OsString::from(value))
            })
        };
        let home = ("HOME", "/home/p");
        for (variables, expected) in [
            (
                &[home, ("XDG_CACHE_HOME", "/xdg")][..],
                Some("/xdg/powerinfer"),
            ),
            (
                &[home, ("XDG_CACHE_HOME", "cache")],
                Some("/home/p/.cache/powerinfer"),
            ),
            (&[("HOME", "p"), ("XDG_CACHE_HOME", "./cache")], None),
            (&[home, ("POWERINFER_CACHE", "here")], Some("here")),
        ] {
            let found = folder(variables);
            assert_eq!(found.as_deref(), expected.map(Path::new), "{variables:?}");
        }
    }
}
