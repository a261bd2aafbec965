//! Reads a pickle as data: the objects it would build lie in one list and refer to each other by
//! number, so that hostile nesting costs neither stack nor copies.

use std::collections::HashMap;

/// What a storage consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    F16,
    Bf16,
    /// Whole numbers and truth values: buffers, never weights.
    Other(&'static str),
}

impl Element {
    /// Bytes of one.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F64 | Self::Other("LongStorage") => 8,
            Self::F32 | Self::Other("IntStorage") => 4,
            Self::F16 | Self::Bf16 | Self::Other("ShortStorage") => 2,
            Self::Other(_) => 1,
        }
    }

    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "FloatStorage" => Self::F32,
            "DoubleStorage" => Self::F64,
            "HalfStorage" => Self::F16,
            "BFloat16Storage" => Self::Bf16,
            "LongStorage" => Self::Other("LongStorage"),
            "IntStorage" => Self::Other("IntStorage"),
            "ShortStorage" => Self::Other("ShortStorage"),
            "CharStorage" => Self::Other("CharStorage"),
            "ByteStorage" => Self::Other("ByteStorage"),
            "BoolStorage" => Self::Other("BoolStorage"),
            _ => return None,
        })
    }
}

/// What a pickle says about a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PickledTensor {
    pub(super) element: Element,
    /// Name of its storage.
    pub(super) storage: String,
    /// Elements of the storage before its first.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    /// Elements between neighbours, per dimension.
    pub(super) strides: Vec<usize>,
}

impl PickledTensor {
    /// How many elements it has.
    pub(super) fn elements(&self) -> usize {
        let product = |product: usize, size: &usize| product.checked_mul(*size);
        self.shape.iter().try_fold(1, product).unwrap_or(usize::MAX)
    }

    /// Index in the storage of its last element.
    pub(super) fn last_element(&self) -> usize {
        let mut dimensions = self.shape.iter().zip(&self.strides);
        let last = dimensions.try_fold(self.offset, |place, (size, stride)| {
            (size - 1).checked_mul(*stride)?.checked_add(place)
        });
        last.unwrap_or(usize::MAX)
    }
}

/// An object's number.
type Id = usize;

/// What a pickle may build.
#[derive(Debug)]
enum Object {
    /// A class or function of those that [`is_known`] lists.
    Global(String),
    Int(i64),
    Text(String),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    List(Vec<Id>),
    /// A function applied to arguments.
    Call {
        function: Id,
        arguments: Id,
    },
    /// A storage.
    Persistent(Id),
    /// None, a truth value or a number that nobody asks for.
    Plain,
}

/// What a pickle of tensors names; nothing else is read on.
fn is_known(module: &str, name: &str) -> bool {
    match module {
        "collections" => name == "OrderedDict",
        "torch._utils" => matches!(name, "_rebuild_tensor_v2" | "_rebuild_parameter"),
        "torch" => name == "Size" || Element::named(name).is_some(),
        _ => false,
    }
}

/// Tensors by name, from a pickled dictionary of them.
pub(super) fn tensors(pickle: &[u8]) -> Result<Vec<(String, PickledTensor)>, String> {
    let mut machine = Machine {
        bytes: pickle,
        objects: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
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
            .ok_or_else(|| format!("`{name}` in it is no tensor, or an empty one"))?;
        tensors.push((name.clone(), tensor));
    }
    Ok(tensors)
}

struct Machine<'a> {
    bytes: &'a [u8],
    objects: Vec<Object>,
    stack: Vec<Id>,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl Machine<'_> {
    fn take(&mut self, count: usize) -> Result<&[u8], String> {
        if count > self.bytes.len() {
            return Err("its pickle is cut off".to_owned());
        }
        let (taken, rest) = self.bytes.split_at(count);
        self.bytes = rest;
        Ok(taken)
    }

    /// An unsigned little-endian number of up to eight bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, String> {
        let taken = self.take(bytes)?;
        Ok(taken
            .iter()
            .rev()
            .fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn line(&mut self) -> Result<String, String> {
        let end = self.bytes.iter().position(|byte| *byte == b'\n');
        let end = end.ok_or("its pickle is cut off")?;
        let line = String::from_utf8_lossy(self.take(end)?).into_owned();
        self.take(1)?;
        Ok(line)
    }

    fn text(&mut self, length: u64) -> Result<Object, String> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = self.take(length)?.to_vec();
        let text = String::from_utf8(bytes).map_err(|_| "a name in it is not UTF-8")?;
        Ok(Object::Text(text))
    }

    fn push(&mut self, object: Object) {
        self.objects.push(object);
        self.stack.push(self.objects.len() - 1);
    }

    fn pop(&mut self) -> Result<Id, String> {
        if self
            .marks
            .last()
            .is_some_and(|mark| *mark >= self.stack.len())
        {
            return Err("its pickle takes more than it put down".to_owned());
        }
        self.stack
            .pop()
            .ok_or_else(|| "its pickle takes more than it put down".to_owned())
    }

    /// Everything above the last mark.
    fn pop_to_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("its pickle misses a mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, count: usize) -> Result<(), String> {
        let mut items = (0..count)
            .map(|_| self.pop())
            .collect::<Result<Vec<_>, _>>()?;
        items.reverse();
        self.push(Object::Tuple(items));
        Ok(())
    }

    /// The object at the top of the stack, to be changed.
    fn top(&mut self) -> Result<&mut Object, String> {
        let id = *self.stack.last().ok_or("its pickle is empty")?;
        Ok(&mut self.objects[id])
    }

    fn set_items(&mut self, items: &[Id]) -> Result<(), String> {
        if !items.len().is_multiple_of(2) {
            return Err("a dictionary in it has a key without a value".to_owned());
        }
        let pairs = items.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        match self.top()? {
            Object::Dict(entries) => entries.extend(pairs),
            _ => return Err("its pickle puts items into what is no dictionary".to_owned()),
        }
        Ok(())
    }

    fn append(&mut self, items: Vec<Id>) -> Result<(), String> {
        match self.top()? {
            Object::List(list) => list.extend(items),
            _ => return Err("its pickle appends to what is no list".to_owned()),
        }
        Ok(())
    }

    fn global(&mut self, module: String, name: String) -> Result<(), String> {
        if !is_known(&module, &name) {
            return Err(format!(
                "it names `{module}.{name}`, and only tensors are read from pickles; save the weights as safetensors"
            ));
        }
        self.push(Object::Global(name));
        Ok(())
    }

    fn remember(&mut self, key: u32) -> Result<(), String> {
        let id = *self.stack.last().ok_or("its pickle is empty")?;
        self.memo.insert(key, id);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let id = self
            .memo
            .get(&key)
            .ok_or("its pickle recalls what it never kept")?;
        self.stack.push(*id);
        Ok(())
    }

    /// Applies a function: an ordered dictionary becomes a dictionary, all else stays a call.
    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let object = match &self.objects[function] {
            Object::Global(name) if name == "OrderedDict" => Object::Dict(Vec::new()),
            Object::Global(_) => Object::Call {
                function,
                arguments,
            },
            _ => return Err("its pickle calls what is no function".to_owned()),
        };
        self.push(object);
        Ok(())
    }

    /// Runs the opcodes of protocols 2 to 5 that tensors need; the object left at the end.
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let code = self.take(1)?[0];
            match code {
                0x80 => drop(self.take(1)?), // PROTO
                0x95 => drop(self.take(8)?), // FRAME
                b'.' => return self.pop(),   // STOP
                b'(' => self.marks.push(self.stack.len()),
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_to_mark()?),
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(module, name)?;
                }
                0x93 => {
                    // STACK_GLOBAL
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (&self.objects[module], &self.objects[name]) {
                        (Object::Text(module), Object::Text(name)) => {
                            let (module, name) = (module.clone(), name.clone());
                            self.global(module, name)?;
                        }
                        _ => return Err("its pickle names something without a name".to_owned()),
                    }
                }
                b'N' | 0x88 | 0x89 => self.push(Object::Plain),
                b'G' => {
                    self.take(8)?;
                    self.push(Object::Plain);
                }
                b'K' => {
                    let number = self.number(1)?;
                    self.push(Object::Int(number as i64));
                }
                b'M' => {
                    let number = self.number(2)?;
                    self.push(Object::Int(number as i64));
                }
                b'J' => {
                    let number = self.number(4)? as u32 as i32;
                    self.push(Object::Int(i64::from(number)));
                }
                0x8a => {
                    // LONG1: little-endian, the highest bit its sign.
                    let length = self.number(1)? as usize;
                    if length > 8 {
                        return Err("a number in it has more than 64 bits".to_owned());
                    }
                    let number = self.number(length)?;
                    let unused = 64 - 8 * length as u32;
                    let number = if length == 0 {
                        0
                    } else {
                        ((number << unused) as i64) >> unused
                    };
                    self.push(Object::Int(number));
                }
                b'X' => {
                    let length = self.number(4)?;
                    let text = self.text(length)?;
                    self.push(text);
                }
                0x8c => {
                    let length = self.number(1)?;
                    let text = self.text(length)?;
                    self.push(text);
                }
                b')' => self.push(Object::Tuple(Vec::new())),
                b']' => self.push(Object::List(Vec::new())),
                b'}' => self.push(Object::Dict(Vec::new())),
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let items = self.pop_to_mark()?;
                    self.push(Object::Tuple(items));
                }
                b'l' => {
                    let items = self.pop_to_mark()?;
                    self.push(Object::List(items));
                }
                b'd' => {
                    let items = self.pop_to_mark()?;
                    self.push(Object::Dict(Vec::new()));
                    self.set_items(&items)?;
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set_items(&[key, value])?;
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.set_items(&items)?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' => {
                    let items = self.pop_to_mark()?;
                    self.append(items)?;
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.push(Object::Persistent(id));
                }
                b'R' | 0x81 => self.call()?,
                // BUILD: attributes of the dictionary itself, which say nothing about tensors.
                b'b' => drop(self.pop()?),
                b'q' => {
                    let key = self.number(1)? as u32;
                    self.remember(key)?;
                }
                b'r' => {
                    let key = self.number(4)? as u32;
                    self.remember(key)?;
                }
                0x94 => self.remember(self.memo.len() as u32)?, // MEMOIZE
                b'h' => {
                    let key = self.number(1)? as u32;
                    self.recall(key)?;
                }
                b'j' => {
                    let key = self.number(4)? as u32;
                    self.recall(key)?;
                }
                other => {
                    return Err(format!(
                        "its pickle has the operation {other:#04x}, which tensors do not need"
                    ));
                }
            }
        }
    }

    /// The tensor that object `id` is.
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
        // A parameter is its tensor, which is no parameter in turn.
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
        // No dimension is empty, and no element stands for several: then a tensor is no larger
        // than its storage.
        let distinct = shape
            .iter()
            .zip(&strides)
            .all(|(size, stride)| *size == 1 || *stride > 0);
        (shape.len() == strides.len() && !shape.contains(&0) && distinct).then_some(())?;
        Some(PickledTensor {
            element: Element::named(class)?,
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

    /// A pickle of one tensor, as PyTorch writes it, with `global` as the function called.
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
    fn a_tensor_is_read_as_data() {
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
    fn what_is_no_tensor_is_refused_by_name() {
        let message = tensors(&pickle("os\nsystem")).unwrap_err();
        assert!(message.contains("`os.system`"), "{message}");
        let message = tensors(&pickle("builtins\neval")).unwrap_err();
        assert!(message.contains("`builtins.eval`"), "{message}");
    }

    #[test]
    fn nesting_and_cycles_cost_nothing() {
        // A million tuples inside each other, and a list that holds itself.
        let mut deep = b"\x80\x02)".to_vec();
        deep.extend(std::iter::repeat_n(0x85, 1_000_000));
        deep.push(b'.');
        assert!(tensors(&deep).is_err());
        assert!(tensors(b"\x80\x02]q\x00h\x00a.").is_err());
        // Each tuple holds the one before it twice: 2^40 leaves if they were copied.
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
