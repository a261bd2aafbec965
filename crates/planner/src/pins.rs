//! Pins: parts whose device the user prescribes.

use std::str::FromStr;

use powerinfer_artifact::plan::Device;
use powerinfer_solver::Problem;

use crate::PlannerError;

/// A part of a model with a prescribed device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pin {
    /// The part.
    pub part: Part,
    /// First and last pinned layer; `None` for all layers.
    pub layers: Option<(usize, usize)>,
    /// The device.
    pub device: Device,
}

/// Part of a model that can be pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Attention and neurons.
    Layers,
    /// Attention.
    Attention,
    /// The output head.
    Head,
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            "write a part and its device, such as `attention=gpu`, `layers:0-9=cpu` or `head=gpu`"
                .to_owned()
        };
        let (what, device) = text.split_once('=').ok_or_else(wrong)?;
        let device = match device.trim() {
            "gpu" => Device::Gpu,
            "cpu" => Device::Cpu,
            _ => return Err(wrong()),
        };
        let (part, layers) = match what.split_once(':') {
            Some((part, layers)) => (part, Some(layers)),
            None => (what, None),
        };
        let part = match part.trim() {
            "layers" => Part::Layers,
            "attention" => Part::Attention,
            "head" if layers.is_none() => Part::Head,
            _ => return Err(wrong()),
        };
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| wrong());
        let layers = layers
            .map(|layers| match layers.split_once('-') {
                Some((first, last)) => Ok((number(first)?, number(last)?)),
                None => number(layers).map(|layer| (layer, layer)),
            })
            .transpose()?;
        match layers {
            Some((first, last)) if first > last => Err(wrong()),
            _ => Ok(Self {
                part,
                layers,
                device,
            }),
        }
    }
}

/// Applies `pins` to `problem`.
pub(crate) fn pin(pins: &[Pin], problem: &mut Problem) -> Result<(), PlannerError> {
    let count = problem.layers.len();
    for pin in pins {
        let (first, last) = pin.layers.unwrap_or((0, count.saturating_sub(1)));
        if last >= count {
            return Err(PlannerError::PinnedLayer {
                layer: last,
                last: count - 1,
            });
        }
        let mut slots: Vec<&mut Option<Device>> = Vec::new();
        match pin.part {
            Part::Head => slots.push(&mut problem.head_pin),
            Part::Attention => {
                let layers = problem.layers[first..=last].iter_mut();
                slots.extend(layers.map(|layer| &mut layer.pins.attention));
            }
            Part::Layers => {
                for layer in &mut problem.layers[first..=last] {
                    slots.push(&mut layer.pins.attention);
                    slots.push(&mut layer.pins.neurons);
                }
            }
        }
        for slot in slots {
            if slot.is_some_and(|device| device != pin.device) {
                return Err(PlannerError::PinnedTwice);
            }
            *slot = Some(pin.device);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_parsed_or_refused() {
        let pin = |text: &str| text.parse::<Pin>();
        assert_eq!(
            pin("layers:3-7=gpu"),
            Ok(Pin {
                part: Part::Layers,
                layers: Some((3, 7)),
                device: Device::Gpu
            })
        );
        assert_eq!(
            pin("attention:2=cpu").map(|pin| pin.layers),
            Ok(Some((2, 2)))
        );
        assert_eq!(pin("head=cpu").map(|pin| pin.part), Ok(Part::Head));
        for bad in [
            "",
            "head",
            "head:1=gpu",
            "layers=tpu",
            "layers:7-3=gpu",
            "ffn=gpu",
            "layers:x=gpu",
        ] {
            let message = pin(bad).unwrap_err();
            assert!(
                message.contains("such as `attention=gpu`"),
                "{bad}: {message}"
            );
        }
    }
}
