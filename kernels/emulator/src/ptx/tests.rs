//! The interpreter on the shipped PTX and on small modules.

use powerinfer_kernels::cuda::MODULES;

use super::{decode::decode, parse::Module};

#[test]
fn all_shipped_kernels_are_known() {
    let mut kernels = 0usize;
    for (name, ptx) in MODULES {
        let module = Module::parse(name, ptx).unwrap();
        for function in module.functions.iter().filter(|found| found.is_kernel) {
            if let Err(error) = decode(&module, function) {
                panic!("{error}");
            }
            kernels += 1;
        }
    }
    let entries = MODULES.map(|(_, ptx)| ptx.matches(".visible .entry").count());
    assert_eq!(kernels, entries.into_iter().sum::<usize>());
}
