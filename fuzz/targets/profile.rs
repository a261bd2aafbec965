#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| powerinfer_attack::fuzz("profile", data));
