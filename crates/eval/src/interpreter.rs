//! Untrusted Python inside this process: an interpreter without files or network, with limits on time, on the size of a
//! value and on the depth of calls.

use std::thread;
use std::time::Duration;

use monty::MontyRun;
use monty_types::{
    CompileOptions, ExcType, MontyException, MontyObject, PrintWriter, ResourceLimits,
    ResourceTracker,
};

/// Limits of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Wall-clock time. It also bounds the memory of many values together, which takes time to fill.
    pub duration: Duration,
    /// Bytes of one value, checked before it is built.
    ///
    /// It also keeps single operations short: time is checked between them.
    pub value_bytes: usize,
    /// Depth of nested calls.
    pub call_depth: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            duration: Duration::from_millis(250),
            value_bytes: 1 << 20,
            call_depth: 200,
        }
    }
}

/// Reason why a program has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The source is no Python that the interpreter supports.
    #[error("syntax error: {0}")]
    Syntax(String),
    /// An uncaught exception; recursion beyond the limit is one.
    #[error("{kind}: {message}")]
    Raised {
        /// Name of the exception's class.
        kind: String,
        /// Its message; may be empty.
        message: String,
    },
    /// The time limit was exceeded.
    #[error("time limit exceeded")]
    Timeout,
    /// A value would have exceeded its limit.
    #[error("memory limit exceeded")]
    Memory,
    /// The interpreter panicked: a defect of its own.
    #[error("the interpreter panicked")]
    Panicked,
}

/// Value of the last expression of a program.
#[derive(Debug, Clone)]
pub struct Value(MontyObject);

impl Value {
    /// The value as Python's `repr` shows it.
    pub fn repr(&self) -> String {
        self.0.py_repr()
    }

    /// Elements of a list; none for any other value.
    pub fn elements(&self) -> Option<Vec<Value>> {
        match &self.0 {
            MontyObject::List(elements) => Some(elements.iter().cloned().map(Self).collect()),
            _ => None,
        }
    }
}

/// Stack size for every recursion of parser and interpreter within [`Limits`].
const STACK_BYTES: usize = 64 << 20;

/// Executes `source` and returns the value of its last expression.
///
/// The interpreter runs in a thread of its own, whose panic becomes a [`Fault`]. The program's output is discarded.
///
/// # Errors
///
/// Fails if the program raises an exception, exceeds a limit, or cannot be parsed.
///
/// # Panics
///
/// Panics if the system cannot start a thread.
pub fn run(source: &str, limits: &Limits) -> Result<Value, Fault> {
    let source = source.to_owned();
    let limits = *limits;
    thread::Builder::new()
        .name("python".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || interpret(source, limits))
        .expect("the system can start a thread")
        .join()
        .unwrap_or(Err(Fault::Panicked))
}

fn interpret(source: String, limits: Limits) -> Result<Value, Fault> {
    let program = MontyRun::new(source, "task.py", Vec::new(), CompileOptions::default())
        .map_err(|exception| Fault::Syntax(described(exception)))?;
    let tracker = ResourceTracker::new(
        ResourceLimits::default()
            .max_duration(limits.duration)
            .max_memory(limits.value_bytes)
            .max_recursion_depth(limits.call_depth),
    );
    program
        .run(Vec::new(), tracker, PrintWriter::Disabled)
        .map(Value)
        .map_err(|exception| match exception.exc_type() {
            ExcType::TimeoutError => Fault::Timeout,
            ExcType::MemoryError => Fault::Memory,
            kind => Fault::Raised {
                kind: kind.to_string(),
                message: described(exception),
            },
        })
}

fn described(exception: MontyException) -> String {
    exception.into_message().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repr(source: &str) -> Result<String, Fault> {
        run(source, &Limits::default()).map(|value| value.repr())
    }

    fn raised(source: &str) -> String {
        match repr(source) {
            Err(Fault::Raised { kind, .. }) => kind,
            other => panic!("{source} gave {other:?}"),
        }
    }

    #[test]
    fn the_value_is_that_of_the_last_expression() {
        assert_eq!(
            repr("x = [1, 'a']\nx + [None, True]"),
            Ok("[1, 'a', None, True]".into())
        );
        let list = run("[1, [2]]", &Limits::default()).unwrap();
        let elements: Vec<String> = list.elements().unwrap().iter().map(Value::repr).collect();
        assert_eq!(elements, ["1", "[2]"]);
    }

    #[test]
    fn an_endless_loop_is_stopped() {
        assert_eq!(repr("while True:\n    pass"), Err(Fault::Timeout));
        assert_eq!(repr("sum(range(10 ** 12))"), Err(Fault::Timeout));
    }

    #[test]
    fn a_memory_bomb_is_a_fault_and_not_a_crash() {
        for source in [
            "[0] * 10 ** 10",
            "'a' * 10 ** 10",
            "2 ** 10 ** 10",
            "'a'.ljust(10 ** 9)",
            "x = 'a'\nwhile True:\n    x = x + x",
            "x = [1]\nwhile True:\n    x += x",
            "x = []\nwhile True:\n    x.append('a' * 90000)",
            "x = 3\nwhile True:\n    x = x * x",
            "x = {}\nwhile True:\n    x[len(x)] = [0] * 1000",
        ] {
            let outcome = repr(source);
            assert!(
                matches!(outcome, Err(Fault::Memory | Fault::Timeout)),
                "{source} gave {outcome:?}"
            );
        }
    }

    #[test]
    fn files_and_the_system_are_out_of_reach() {
        assert_eq!(raised("open('/etc/passwd').read()"), "NotImplementedError");
        assert_eq!(raised("import os\nos.listdir('/')"), "NotImplementedError");
        assert_eq!(raised("import subprocess"), "ModuleNotFoundError");
    }

    #[test]
    fn deep_recursion_is_an_exception() {
        assert_eq!(
            raised("def f(n):\n    return f(n + 1)\nf(0)"),
            "RecursionError"
        );
    }

    #[test]
    fn deeply_nested_values_and_sources_do_not_overflow_the_stack() {
        let nested = "x = []\nfor i in range(20000):\n    x = [x]\nx";
        // Any outcome but a crash.
        let _ = repr(nested);
        for brackets in [50, 500, 5000, 50000] {
            let source = "(".repeat(brackets) + "1" + &")".repeat(brackets);
            let _ = repr(&source);
            let _ = repr(&("-".repeat(brackets) + "1"));
            let _ = repr(&("1+".repeat(brackets) + "1"));
        }
    }

    #[test]
    fn garbage_is_a_syntax_error() {
        for source in [
            "def f(x:",
            "return )",
            "\u{0}\u{1}",
            "x = = 1",
            "\"\"\"open",
        ] {
            let outcome = repr(source);
            assert!(
                matches!(outcome, Err(Fault::Syntax(_))),
                "{source} gave {outcome:?}"
            );
        }
    }

    #[test]
    fn exceptions_carry_their_message() {
        let fault = repr("raise ValueError('too bad')").unwrap_err();
        assert_eq!(fault.to_string(), "ValueError: too bad");
    }
}
