//! Validation of hardware values.

use super::{Hardware, HardwareError};

/// Valid range of a value.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    /// Size or speed: 1 or more.
    Positive,
    /// Delay or reserve: 0 or more.
    NotNegative,
}

impl Hardware {
    /// Lists every value: dotted name, value, valid range.
    fn figures(&self) -> Vec<(String, f64, Bound)> {
        use Bound::{NotNegative, Positive};
        let cpu = &self.cpu;
        let mut figures = Vec::new();
        let mut add = |name: &str, value: f64, bound: Bound| {
            figures.push((name.to_owned(), value, bound));
        };
        add("cpu.threads", cpu.threads as f64, Positive);
        add(
            "cpu.read_bandwidth_bytes_per_second",
            cpu.read_bandwidth_bytes_per_second,
            Positive,
        );
        add("cpu.ram_bytes", cpu.ram_bytes as f64, Positive);
        for (name, value) in [
            ("cpu.row_seconds", cpu.row_seconds),
            ("cpu.sum_row_seconds", cpu.sum_row_seconds),
            ("cpu.kernel_seconds", cpu.kernel_seconds),
            ("cpu.hidden_seconds", cpu.hidden_seconds),
            ("cpu.neuron_seconds", cpu.neuron_seconds),
            ("cpu.vocabulary_seconds", cpu.vocabulary_seconds),
            ("cpu.layer_seconds", cpu.layer_seconds),
            ("cpu.token_seconds", cpu.token_seconds),
        ] {
            add(name, value, NotNegative);
        }
        for (name, value) in [
            ("cpu.operations_per_second", cpu.operations_per_second),
            (
                "cpu.float_operations_per_second",
                cpu.float_operations_per_second,
            ),
        ] {
            if let Some(value) = value {
                add(name, value, Positive);
            }
        }
        for (index, read) in cpu.reads.iter().enumerate() {
            for (name, value) in [
                ("threads", read.threads as f64),
                ("row_bytes", read.row_bytes as f64),
                ("bytes_per_second", read.bytes_per_second),
            ] {
                add(&format!("cpu.reads[{index}].{name}"), value, Positive);
            }
        }
        for (index, kernel) in cpu.kernels.iter().enumerate() {
            for (name, value) in [
                ("threads", kernel.threads as f64),
                ("row_bytes", kernel.row_bytes as f64),
                ("dense_bytes_per_second", kernel.dense_bytes_per_second),
                ("rows_bytes_per_second", kernel.rows_bytes_per_second),
                ("axpy_bytes_per_second", kernel.axpy_bytes_per_second),
                (
                    "dense_axpy_bytes_per_second",
                    kernel.dense_axpy_bytes_per_second,
                ),
            ] {
                add(&format!("cpu.kernels[{index}].{name}"), value, Positive);
            }
        }
        let Some(gpu) = &self.gpu else {
            return figures;
        };
        add(
            "gpu.read_bandwidth_bytes_per_second",
            gpu.read_bandwidth_bytes_per_second,
            Positive,
        );
        add("gpu.vram_bytes", gpu.vram_bytes as f64, Positive);
        add(
            "gpu.pcie_bandwidth_bytes_per_second",
            gpu.pcie_bandwidth_bytes_per_second,
            Positive,
        );
        for (name, value) in [
            ("gpu.pcie_latency_seconds", gpu.pcie_latency_seconds),
            ("gpu.sync_seconds", gpu.sync_seconds),
            ("gpu.kernel_launch_seconds", gpu.kernel_launch_seconds),
        ] {
            add(name, value, NotNegative);
        }
        if let Some(value) = gpu.operations_per_second {
            add("gpu.operations_per_second", value, Positive);
        }
        figures
    }

    /// Checks every value: sizes and speeds are at least 1, delays and reserves at least 0.
    ///
    /// # Errors
    ///
    /// The first value that is out of range.
    pub fn validate(&self) -> Result<(), HardwareError> {
        let hardware = || self.name.clone();
        for (field, value, bound) in self.figures() {
            // At most an exabyte (per second), and a quarter of an hour.
            let (least, most) = match bound {
                Bound::Positive => (1.0, 1e18),
                Bound::NotNegative => (0.0, 1e3),
            };
            if value.is_finite() && value > most {
                return Err(HardwareError::TooLarge {
                    hardware: hardware(),
                    field,
                    value,
                    most,
                });
            }
            if value.is_finite() && value >= least {
                continue;
            }
            return Err(match bound {
                Bound::Positive => HardwareError::NotPositive {
                    hardware: hardware(),
                    field,
                    value,
                },
                Bound::NotNegative => HardwareError::Negative {
                    hardware: hardware(),
                    field,
                    value,
                },
            });
        }
        match &self.gpu {
            Some(gpu) if gpu.free_bytes.is_some_and(|free| free > gpu.vram_bytes) => {
                Err(HardwareError::FreeExceedsTotal {
                    hardware: hardware(),
                    free: gpu.free_bytes.unwrap_or_default(),
                    total: gpu.vram_bytes,
                })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use powerinfer_tensor::Format;

    use super::*;
    use crate::hardware::{KernelSpeed, ReadSpeed, named};

    /// Hardware with a value in every field.
    pub(in crate::hardware) fn every_figure_set() -> Hardware {
        let mut hardware = named("pc-high").unwrap();
        hardware.cpu.layer_seconds = 1e-6;
        hardware.cpu.token_seconds = 1e-6;
        hardware.cpu.sum_row_seconds = 1e-9;
        hardware.cpu.float_operations_per_second = Some(1e11);
        hardware.cpu.reads = vec![ReadSpeed {
            threads: 2,
            row_bytes: 4096,
            bytes_per_second: 1e10,
        }];
        hardware.cpu.kernels = vec![KernelSpeed {
            format: Format::Q4_0,
            threads: 2,
            row_bytes: 2304,
            dense_bytes_per_second: 4e9,
            rows_bytes_per_second: 3e9,
            axpy_bytes_per_second: 2e9,
            dense_axpy_bytes_per_second: 3.5e9,
        }];
        hardware.gpu.as_mut().unwrap().free_bytes = Some(20 << 30);
        hardware
    }

    /// Replaces the value at `name`, such as `cpu.kernels[0].threads`, in JSON.
    fn put(json: &mut serde_json::Value, name: &str, value: serde_json::Value) {
        let pointer = name.replace(['.', '['], "/").replace(']', "");
        *json.pointer_mut(&format!("/{pointer}")).unwrap() = value;
    }

    #[test]
    fn invalid_figures_are_reported_by_name() {
        let good = every_figure_set();
        good.validate().unwrap();
        let json = serde_json::to_value(&good).unwrap();
        let names = good.figures();
        assert!(names.len() > 25, "{}", names.len());
        for (name, _, bound) in names {
            let is_count = ["threads", "row_bytes", "ram_bytes", "vram_bytes"]
                .iter()
                .any(|count| name.ends_with(count));
            let mut bad = json.clone();
            let wrong = if bound == Bound::Positive { 0 } else { -1 };
            put(&mut bad, &name, wrong.into());
            let bad: Hardware = serde_json::from_value(bad).unwrap();
            let error = bad.validate().unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}` is {wrong}")), "{error}");
            assert!(error.contains("hardware `pc-high`"), "{error}");
            if is_count {
                continue;
            }
            // TOML has values that JSON lacks.
            let mark = 777_777.125;
            let mut marked = json.clone();
            put(&mut marked, &name, mark.into());
            let marked: Hardware = serde_json::from_value(marked).unwrap();
            let text = marked.to_toml();
            assert_eq!(text.matches("777777.125").count(), 1, "{name}: {text}");
            for value in ["nan", "-inf", "inf", "-1.0"] {
                let text = text.replace("777777.125", value);
                let path = std::path::Path::new("machine.toml");
                let error = Hardware::parse(&text, path).unwrap_err().to_string();
                assert!(error.contains(&format!("`{name}` is ")), "{error}");
            }
        }
    }

    #[test]
    fn free_memory_above_the_total_is_refused() {
        let mut bad = every_figure_set();
        bad.gpu.as_mut().unwrap().free_bytes = Some(u64::MAX);
        let error = bad.validate().unwrap_err().to_string();
        assert!(error.contains("`gpu.free_bytes`"), "{error}");
    }

    #[test]
    fn delays_may_be_zero() {
        let mut free = every_figure_set();
        free.gpu.as_mut().unwrap().sync_seconds = 0.0;
        free.cpu.row_seconds = 0.0;
        free.validate().unwrap();
    }

    #[test]
    fn an_unknown_field_is_refused() {
        let mut json = serde_json::to_value(named("cpu-only").unwrap()).unwrap();
        json["cpu"]["cores"] = 8.into();
        let error = serde_json::from_value::<Hardware>(json).unwrap_err();
        assert!(error.to_string().contains("cores"));
    }
}
