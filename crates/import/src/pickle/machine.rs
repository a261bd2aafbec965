//! Pickle interpreter without side effects: objects are kept in one list and refer to each other by index, so
//! that hostile nesting needs neither stack nor copies.

use std::collections::HashMap;

use super::element::Element;

/// Index of an object.
pub(super) type Id = usize;

/// Object that a pickle builds.
#[derive(Debug)]
pub(super) enum Object {
    /// Class or function accepted by [`is_known`].
    Global(String),
    Int(i64),
    Text(String),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    List(Vec<Id>),
    /// Application of a function to arguments.
    Call {
        function: Id,
        arguments: Id,
    },
    /// Storage.
    Persistent(Id),
    /// None, a Boolean or a float: not used.
    Plain,
}

/// Returns whether a pickle of tensors may name this class or function; others are refused.
fn is_known(module: &str, name: &str) -> bool {
    match module {
        "collections" => name == "OrderedDict",
        "torch._utils" => matches!(name, "_rebuild_tensor_v2" | "_rebuild_parameter"),
        "torch" => name == "Size" || Element::from_name(name).is_some(),
        _ => false,
    }
}

/// Pickle interpreter.
pub(super) struct Machine<'a> {
    bytes: &'a [u8],
    pub(super) objects: Vec<Object>,
    stack: Vec<Id>,
    /// Heights of the stack at open marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Machine<'a> {
    /// Creates an interpreter of `pickle`.
    pub(super) fn new(pickle: &'a [u8]) -> Self {
        Self {
            bytes: pickle,
            objects: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
    }

    fn take(&mut self, count: usize) -> Result<&[u8], String> {
        if count > self.bytes.len() {
            return Err("its pickle is truncated".to_owned());
        }
        let (taken, rest) = self.bytes.split_at(count);
        self.bytes = rest;
        Ok(taken)
    }

    /// Reads an unsigned little-endian integer of up to eight bytes.
    fn number(&mut self, bytes: usize) -> Result<u64, String> {
        let taken = self.take(bytes)?;
        Ok(taken
            .iter()
            .rev()
            .fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn line(&mut self) -> Result<String, String> {
        let end = self.bytes.iter().position(|byte| *byte == b'\n');
        let end = end.ok_or("its pickle is truncated")?;
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
            return Err("its pickle pops from an empty stack".to_owned());
        }
        self.stack
            .pop()
            .ok_or_else(|| "its pickle pops from an empty stack".to_owned())
    }

    /// Pops everything above the last mark.
    fn pop_to_mark(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("its pickle lacks a mark")?;
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

    /// Returns the object at the top of the stack for modification.
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
            _ => {
                return Err("its pickle sets items of something other than a dictionary".to_owned());
            }
        }
        Ok(())
    }

    fn append(&mut self, items: Vec<Id>) -> Result<(), String> {
        match self.top()? {
            Object::List(list) => list.extend(items),
            _ => return Err("its pickle appends to something other than a list".to_owned()),
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
            .ok_or("its pickle reads an unset memo entry")?;
        self.stack.push(*id);
        Ok(())
    }

    /// Applies a function: an `OrderedDict` becomes a dictionary, others remain calls.
    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let object = match &self.objects[function] {
            Object::Global(name) if name == "OrderedDict" => Object::Dict(Vec::new()),
            Object::Global(_) => Object::Call {
                function,
                arguments,
            },
            _ => return Err("its pickle calls something other than a function".to_owned()),
        };
        self.push(object);
        Ok(())
    }

    /// Runs the opcodes of protocols 2 to 5 that tensors need; returns the final object.
    pub(super) fn run(&mut self) -> Result<Id, String> {
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
                        _ => return Err("its pickle has a global without a name".to_owned()),
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
                // BUILD: attributes of the dictionary itself, which do not describe tensors.
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
                        "its pickle has the opcode {other:#04x}, which tensors do not need"
                    ));
                }
            }
        }
    }
}
