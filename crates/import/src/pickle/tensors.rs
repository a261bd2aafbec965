//! Tensors described by a pickle.

use super::{
    element::Element,
    machine::{Id, Machine, Object},
};

/// Description of a tensor in a pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PickledTensor {
    pub(super) element: Element,
    /// Name of its storage.
    pub(super) storage: String,
    /// Index of the tensor's first element in the storage.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    /// Strides in elements, per dimension.
    pub(super) strides: Vec<usize>,
}

impl PickledTensor {
    /// Number of elements.
    pub(super) fn elements(&self) -> usize {
        let product = |product: usize, size: &usize| product.checked_mul(*size);
        self.shape.iter().try_fold(1, product).unwrap_or(usize::MAX)
    }

    /// Index of the last element in the storage.
    pub(super) fn last_element(&self) -> usize {
        let mut dimensions = self.shape.iter().zip(&self.strides);
        let last = dimensions.try_fold(self.offset, |place, (size, stride)| {
            (size - 1).checked_mul(*stride)?.checked_add(place)
        });
        last.unwrap_or(usize::MAX)
    }
}

/// Parses a pickled dictionary of tensors by name.
pub(super) fn tensors(pickle: &[u8]) -> Result<Vec<(String, PickledTensor)>, String> {
    let mut machine = Machine::new(pickle);
    let top = machine.run()?;
    let Object::Dict(entries) = &machine.objects[top] else {
        return Err("it does not hold a dictionary of tensors".to_owned());
    };
    let mut tensors: Vec<(String, PickledTensor)> = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        let Object::Text(name) = &machine.objects[*key] else {
            return Err("a key of its dictionary is not a name".to_owned());
        };
        let tensor = machine
            .tensor(*value)
            .ok_or_else(|| format!("`{name}` in it is not a tensor, or is empty"))?;
        tensors.push((name.clone(), tensor));
    }
    Ok(tensors)
}

impl Machine<'_> {
    /// Interprets object `id` as a tensor.
    fn tensor(&self, id: Id) -> Option<PickledTensor> {
        let Object::Call {
            function,
            arguments,
        } = &self.objects[id]
        else {
            return None;
        };
        let (Object::Global(name), Object::Tuple(arguments)) =
            (&self.objects[*function], &self.objects[*arguments])
        else {
            return None;
        };
        // A parameter wraps a tensor, not another parameter.
        if name == "_rebuild_parameter" {
            let inner = *arguments.first()?;
            let Object::Call { function, .. } = &self.objects[inner] else {
                return None;
            };
            return match &self.objects[*function] {
                Object::Global(name) if name == "_rebuild_tensor_v2" => self.tensor(inner),
                _ => None,
            };
        }
        if name != "_rebuild_tensor_v2" {
            return None;
        }
        let [storage, offset, shape, strides, ..] = arguments[..] else {
            return None;
        };
        let Object::Persistent(storage) = self.objects[storage] else {
            return None;
        };
        let Object::Tuple(storage) = &self.objects[storage] else {
            return None;
        };
        let [_, class, key, ..] = storage[..] else {
            return None;
        };
        let Object::Global(class) = &self.objects[class] else {
            return None;
        };
        let Object::Text(key) = &self.objects[key] else {
            return None;
        };
        let shape = self.sizes(shape)?;
        let strides = self.sizes(strides)?;
        // No dimension is empty and no elements overlap, so a tensor is no larger than its storage.
        let distinct = shape
            .iter()
            .zip(&strides)
            .all(|(size, stride)| *size == 1 || *stride > 0);
        (shape.len() == strides.len() && !shape.contains(&0) && distinct).then_some(())?;
        Some(PickledTensor {
            element: Element::from_name(class)?,
            storage: key.clone(),
            offset: self.size(offset)?,
            shape,
            strides,
        })
    }

    fn size(&self, id: Id) -> Option<usize> {
        match self.objects[id] {
            Object::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    fn sizes(&self, id: Id) -> Option<Vec<usize>> {
        match &self.objects[id] {
            Object::Tuple(items) => items.iter().map(|item| self.size(*item)).collect(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pickle of one tensor as PyTorch writes it, with `global` as the function called.
    fn pickle(global: &str) -> Vec<u8> {
        let mut bytes = b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(X\x01\x00\x00\x00w".to_vec();
        bytes.extend(format!("c{global}\n((X\x07\0\0\0storagectorch\nFloatStorage\n").bytes());
        bytes.extend(
            b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86",
        );
        bytes.extend(b"\x89ccollections\nOrderedDict\n)RtRu.");
        bytes
    }

    #[test]
    fn a_tensor_is_parsed() {
        let read = tensors(&pickle("torch._utils\n_rebuild_tensor_v2")).unwrap();
        assert_eq!(read.len(), 1);
        let (name, tensor) = &read[0];
        assert_eq!(name, "w");
        assert_eq!(
            (&tensor.shape[..], &tensor.strides[..]),
            (&[2, 3][..], &[3, 1][..])
        );
        assert_eq!((tensor.element, tensor.last_element()), (Element::F32, 5));
    }

    #[test]
    fn other_globals_are_refused_by_name() {
        let message = tensors(&pickle("os\nsystem")).unwrap_err();
        assert!(message.contains("`os.system`"), "{message}");
        let message = tensors(&pickle("builtins\neval")).unwrap_err();
        assert!(message.contains("`builtins.eval`"), "{message}");
    }

    #[test]
    fn nesting_and_cycles_need_little_memory() {
        // A million nested tuples, and a list that contains itself.
        let mut deep = b"\x80\x02)".to_vec();
        deep.extend(std::iter::repeat_n(0x85, 1_000_000));
        deep.push(b'.');
        assert!(tensors(&deep).is_err());
        assert!(tensors(b"\x80\x02]q\x00h\x00a.").is_err());
        // Each tuple contains the previous one twice: 2^40 leaves if they were copied.
        let mut bomb = b"\x80\x02)q\x00".to_vec();
        for _ in 0..40 {
            bomb.extend(b"h\x00h\x00\x86q\x00");
        }
        bomb.push(b'.');
        assert!(tensors(&bomb).is_err());
    }

    proptest::proptest! {
        #[test]
        fn mutated_pickles_never_panic(place in 0usize..200, byte in 0u8..=255, cut in 0usize..220) {
            let mut bytes = pickle("torch._utils\n_rebuild_tensor_v2");
            let place = place % bytes.len();
            bytes[place] = byte;
            bytes.truncate(cut.max(1));
            if let Ok(tensors) = tensors(&bytes) {
                for (_, tensor) in tensors {
                    let _ = tensor.last_element();
                }
            }
        }
    }
}
