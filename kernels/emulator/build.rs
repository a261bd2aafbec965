//! Compiles the CUDA kernels as C++ (`cfg(emulated)`), on 64-bit Linux with glibc and a C++ compiler.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo:rustc-check-cfg=cfg(emulated)");
    println!("cargo:rerun-if-changed=cpp");
    println!("cargo:rerun-if-changed=../cuda");
    let variable = |name| env::var(name).unwrap_or_default();
    let is_known = variable("CARGO_CFG_TARGET_OS") == "linux"
        && variable("CARGO_CFG_TARGET_ENV") == "gnu"
        && variable("CARGO_CFG_TARGET_POINTER_WIDTH") == "64";
    if !is_known {
        println!(
            "cargo:warning=the CUDA emulator is built on Linux with glibc only; its tests need POWERINFER_SKIP_EMULATOR=1"
        );
        return;
    }
    let out = PathBuf::from(variable("OUT_DIR"));
    let mut sources: Vec<_> = fs::read_dir("../cuda")
        .expect("the folder of the kernels")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "cu"))
        .collect();
    sources.sort();
    // One translation unit for all kernels, compiled twice: names are its own, headers are compiled once.
    let mut all = String::from("#include \"emulator.h\"\nnamespace {\n");
    all += "const emulator::Kernel* kernels = nullptr;\n";
    for source in &sources {
        let name = source.file_name().expect("a file").to_string_lossy();
        all += &format!("#include \"{name}\"\n");
    }
    all += "#include \"faulty_kernels.cu\"\n}\n";
    let unit = |list: &str| {
        let file = out.join(format!("{list}.cc"));
        let getter =
            format!("const emulator::Kernel* emulator::{list}() {{ return ::kernels; }}\n");
        fs::write(&file, format!("{all}{getter}")).expect("a writable build folder");
        file
    };
    let compiler = || {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .include("cpp")
            .include("../cuda")
            .opt_level(2)
            // Fibers jump between stacks.
            .flag("-U_FORTIFY_SOURCE")
            .flag("-fno-strict-aliasing")
            .flag("-fno-stack-protector")
            // As in the PTX, only an explicit `fmaf` is fused.
            .flag("-ffp-contract=off")
            .warnings(false);
        build
    };
    // No compiler means no emulator; a compiler that refuses the kernels is an error.
    let probe = out.join("probe.cc");
    fs::write(
        &probe,
        "#include <ucontext.h>\n#include <vector>\n_Float16 half;\n",
    )
    .expect("a writable build folder");
    if let Err(why) = compiler().file(probe).try_compile("probe") {
        println!(
            "cargo:warning=the CUDA emulator is not built without a C++ compiler, its tests need POWERINFER_SKIP_EMULATOR=1: {why}"
        );
        return;
    }
    let plain = ["cpp/emulator.cc", "cpp/checks.cc"];
    let mut objects = compiler()
        .files(plain)
        .file(unit("plain_kernels"))
        .compile_intermediates();
    // The callbacks of this sanitizer are in `checks.cc`; its runtime library is not linked.
    objects.extend(
        compiler()
            .flag("-fsanitize=thread")
            .file(unit("checked_kernels"))
            .compile_intermediates(),
    );
    compiler()
        .objects(objects)
        .compile("powerinfer_emulated_kernels");
    println!("cargo:rustc-cfg=emulated");
}
