//! [`Placement`].

use powerinfer_artifact::plan::Device;

/// Placement of a layer and of the output head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    /// Hot neurons, in quarters of all.
    pub(crate) quarters: usize,
    pub(crate) attention: Device,
    pub(crate) kv: Device,
    pub(crate) predictor: Device,
    pub(crate) head: Device,
}

/// Everything on the device.
pub(crate) const ALL: Placement = Placement {
    quarters: 4,
    attention: Device::Gpu,
    kv: Device::Gpu,
    predictor: Device::Gpu,
    head: Device::Gpu,
};

/// Everything on the device but half of the neurons.
pub(crate) const HALF: Placement = Placement { quarters: 2, ..ALL };

/// Placements which have every part on the device and on the host.
pub(crate) const PLACEMENTS: [Placement; 6] = [
    ALL,
    HALF,
    Placement {
        quarters: 0,
        head: Device::Cpu,
        ..ALL
    },
    Placement {
        kv: Device::Cpu,
        ..ALL
    },
    Placement {
        quarters: 1,
        predictor: Device::Cpu,
        ..ALL
    },
    Placement {
        quarters: 3,
        attention: Device::Cpu,
        kv: Device::Cpu,
        predictor: Device::Cpu,
        head: Device::Cpu,
    },
];
