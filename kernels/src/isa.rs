//! Instruction sets, and the choice of one at run time.

use std::ffi::OsStr;
use std::fmt;
use std::str::FromStr;

use powerinfer_pool::environment;

use crate::KernelError;
use crate::cpu::Operation;
#[cfg(target_arch = "aarch64")]
use crate::cpu::neon::Neon;
#[cfg(target_arch = "x86_64")]
use crate::cpu::{avx2::Avx2, avx512::Avx512};

/// All names, on every architecture.
const NAMES: [&str; 5] = ["scalar", "avx2", "avx512", "avx512-vnni", "neon"];

/// An instruction set that this processor supports, with the kernels as methods.
///
/// All instruction sets give the same bits; they differ in speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512<true>),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
}

impl Isa {
    /// Scalar code: the specification, portable and slow.
    pub const SCALAR: Isa = Isa(Kind::Scalar);

    /// The instruction set named by `POWERINFER_ISA` (`scalar`, `avx2`, `avx512`, `avx512-vnni` or `neon`), or the fastest
    /// one. Call it once and pass the value on.
    ///
    /// # Errors
    ///
    /// The variable names an unknown instruction set, or one that this processor lacks.
    pub fn detect() -> Result<Isa, KernelError> {
        Isa::choose(environment::isa().as_deref())
    }

    /// [`Isa::detect`] with the value of the variable.
    fn choose(name: Option<&OsStr>) -> Result<Isa, KernelError> {
        match name {
            Some(name) => name.to_string_lossy().parse(),
            None => Ok(Isa::available().pop().unwrap_or(Isa::SCALAR)),
        }
    }

    /// The instruction sets that this processor supports, slowest first; always includes `scalar`.
    pub fn available() -> Vec<Isa> {
        let mut available = vec![Isa::SCALAR];
        #[cfg(target_arch = "x86_64")]
        available.extend(Avx2::detect().map(|avx2| Isa(Kind::Avx2(avx2))));
        #[cfg(target_arch = "x86_64")]
        available.extend(Avx512::detect().map(|avx512| Isa(Kind::Avx512(avx512))));
        #[cfg(target_arch = "x86_64")]
        available.extend(Avx512::detect().map(|avx512| Isa(Kind::Avx512Vnni(avx512))));
        #[cfg(target_arch = "aarch64")]
        available.extend(Neon::detect().map(|neon| Isa(Kind::Neon(neon))));
        available
    }

    /// Name, as in `POWERINFER_ISA`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(_) => "neon",
        }
    }

    /// Runs a kernel with this instruction set.
    pub(crate) fn run<O: Operation>(self, operation: O) -> O::Output {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        use crate::cpu::Simd;
        match self.0 {
            Kind::Scalar => operation.run_scalar(),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(avx2) => avx2.run(operation),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(avx512) => avx512.run(operation),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni(avx512) => avx512.run(operation),
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(neon) => neon.run(operation),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Isa, KernelError> {
        let available = Isa::available();
        if let Some(isa) = available.iter().find(|isa| isa.name() == name) {
            return Ok(*isa);
        }
        if !NAMES.contains(&name) {
            return Err(KernelError::UnknownIsa {
                name: name.to_owned(),
            });
        }
        let names: Vec<_> = available.into_iter().map(Isa::name).collect();
        Err(KernelError::UnsupportedIsa {
            name: name.to_owned(),
            available: names.join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_available_instruction_sets_round_trip() {
        for isa in Isa::available() {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert_eq!(Isa::available()[0], Isa::SCALAR);
    }

    #[test]
    fn the_variable_overrides_the_fastest_instruction_set() {
        let fastest = Isa::available().pop().unwrap();
        assert_eq!(Isa::choose(None), Ok(fastest));
        assert_eq!(Isa::choose(Some(OsStr::new("scalar"))), Ok(Isa::SCALAR));
        assert!(Isa::choose(Some(OsStr::new("AVX2"))).is_err());
    }

    #[test]
    fn unknown_and_unsupported_instruction_sets_are_distinct_errors() {
        let unknown = "sse9".parse::<Isa>().unwrap_err().to_string();
        assert_eq!(
            unknown,
            "unknown instruction set `sse9`, expected one of scalar, avx2, avx512, avx512-vnni, neon"
        );
        let foreign = if cfg!(target_arch = "aarch64") {
            "avx2"
        } else {
            "neon"
        };
        let missing = foreign.parse::<Isa>().unwrap_err().to_string();
        assert!(
            missing.starts_with(&format!(
                "this processor does not support `{foreign}`, it supports scalar"
            )),
            "{missing}"
        );
    }
}
