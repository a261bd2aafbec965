//! Untrusted Python inside this process: an interpreter without files or network, with limits on time, on the size of a
//! value and on the depth of calls.

use std::thread;
use std::time::{Duration, Instant};

use monty::{FunctionCall, MontyRun, RunProgress};
use monty_types::{
    CompileOptions, ExcType, ExtFunctionResult, MontyException, MontyObject, NameLookupResult,
    PrintWriter, ResourceLimits, ResourceTracker,
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
    /// The interpreter does not support this source.
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
    /// The interpreter panicked: a bug.
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
/// The interpreter runs in a separate thread, whose panic becomes a [`Fault`]. The program's output is discarded.
///
/// # Errors
///
/// Fails if the program raises an exception, exceeds a limit, or cannot be parsed.
///
/// # Panics
///
/// Panics if the system cannot start a thread.
pub fn run(source: &str, limits: &Limits) -> Result<Value, Fault> {
    on_thread(|| {
        let program = parse(source.to_owned(), Vec::new())?;
        let value = program.run(Vec::new(), limits.tracker(), PrintWriter::Disabled);
        value.map(Value).map_err(fault)
    })
}

/// Name by which tests call the function under test.
pub const CANDIDATE: &str = "function_under_test";

/// Runs `tests`, in which [`CANDIDATE`] is the function called `name` of `program`.
///
/// Each call runs in a new interpreter, and only plain values pass between them: a program can neither change the
/// tests nor return an object that equals everything.
///
/// # Errors
///
/// As [`run`].
///
/// # Panics
///
/// As [`run`].
pub fn run_tests(tests: &str, program: &str, name: &str, limits: &Limits) -> Result<(), Fault> {
    let end = Instant::now() + limits.duration;
    on_thread(|| {
        let tests = parse(tests.to_owned(), Vec::new())?;
        let print = || PrintWriter::Disabled;
        let mut progress = tests.start(Vec::new(), limits.tracker(), print());
        loop {
            progress = match progress.map_err(fault)? {
                RunProgress::Complete(_) => return Ok(()),
                RunProgress::NameLookup(lookup) if lookup.name == CANDIDATE => {
                    let function = MontyObject::Function {
                        name: CANDIDATE.to_owned(),
                        docstring: None,
                    };
                    lookup.resume(NameLookupResult::Value(function), print())
                }
                RunProgress::NameLookup(lookup) => {
                    lookup.resume(NameLookupResult::Undefined, print())
                }
                RunProgress::FunctionCall(call) if call.function_name == CANDIDATE => {
                    let limits = Limits {
                        duration: end.saturating_duration_since(Instant::now()),
                        ..*limits
                    };
                    let result = match result_of(program, name, &call, &limits) {
                        Ok(value) if is_plain(&value) => ExtFunctionResult::Return(value),
                        Ok(_) => ExtFunctionResult::Error(MontyException::new(
                            ExcType::TypeError,
                            Some(format!("`{name}` does not return plain values")),
                        )),
                        Err(Stop::Raised(exception)) => ExtFunctionResult::Error(exception),
                        Err(Stop::Fault(fault)) => return Err(fault),
                    };
                    call.resume(result, print())
                }
                _ => {
                    return Err(Fault::Raised {
                        kind: ExcType::NotImplementedError.to_string(),
                        message: "the tests use the system".to_owned(),
                    });
                }
            };
        }
    })
}

/// Why a call has no result: an exception, which tests may expect, or what ends the tests.
enum Stop {
    Raised(MontyException),
    Fault(Fault),
}

/// Value of `name(…)` after `program`, with the arguments of `call`.
fn result_of(
    program: &str,
    name: &str,
    call: &FunctionCall,
    limits: &Limits,
) -> Result<MontyObject, Stop> {
    let mut names: Vec<String> = (0..call.args.len())
        .map(|index| format!("argument_{index}"))
        .collect();
    let mut passed = names.clone();
    for (key, _) in &call.kwargs {
        names.push(format!("argument_{}", names.len()));
        passed.push(format!("{key}={}", names[names.len() - 1]));
    }
    let source = format!("{program}\n\n{name}({})\n", passed.join(", "));
    let inputs = call.kwargs.iter().map(|(_, value)| value);
    let inputs = call.args.iter().chain(inputs).cloned().collect();
    parse(source, names)
        .map_err(Stop::Fault)?
        .run(inputs, limits.tracker(), PrintWriter::Disabled)
        .map_err(|exception| match limit(&exception) {
            Some(fault) => Stop::Fault(fault),
            None => Stop::Raised(exception),
        })
}

/// Whether a value is plain data.
fn is_plain(value: &MontyObject) -> bool {
    match value {
        MontyObject::None
        | MontyObject::Bool(_)
        | MontyObject::Int(_)
        | MontyObject::BigInt(_)
        | MontyObject::Float(_)
        | MontyObject::String(_)
        | MontyObject::Bytes(_) => true,
        MontyObject::List(elements)
        | MontyObject::Tuple(elements)
        | MontyObject::Set(elements)
        | MontyObject::FrozenSet(elements) => elements.iter().all(is_plain),
        MontyObject::Dict(pairs) => pairs
            .into_iter()
            .all(|(key, value)| is_plain(key) && is_plain(value)),
        _ => false,
    }
}

/// Calls `run` on a thread with a stack for every recursion.
fn on_thread<T: Send>(run: impl FnOnce() -> Result<T, Fault> + Send) -> Result<T, Fault> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name("python".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, run)
            .expect("the system can start a thread")
            .join()
            .unwrap_or(Err(Fault::Panicked))
    })
}

fn parse(source: String, inputs: Vec<String>) -> Result<MontyRun, Fault> {
    MontyRun::new(source, "task.py", inputs, CompileOptions::default())
        .map_err(|exception| Fault::Syntax(described(exception)))
}

impl Limits {
    fn tracker(&self) -> ResourceTracker {
        ResourceTracker::new(
            ResourceLimits::default()
                .max_duration(self.duration)
                .max_memory(self.value_bytes)
                .max_recursion_depth(self.call_depth),
        )
    }
}

/// The limit that ended a program. The interpreter reports it as an exception that a program can also raise; only the message
/// differs.
fn limit(exception: &MontyException) -> Option<Fault> {
    let message = exception.message().unwrap_or_default();
    match exception.exc_type() {
        ExcType::TimeoutError if message.starts_with("time limit exceeded: ") => {
            Some(Fault::Timeout)
        }
        ExcType::MemoryError if message.starts_with("memory limit exceeded: ") => {
            Some(Fault::Memory)
        }
        _ => None,
    }
}

fn fault(exception: MontyException) -> Fault {
    limit(&exception).unwrap_or_else(|| Fault::Raised {
        kind: exception.exc_type().to_string(),
        message: described(exception),
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
    fn a_program_cannot_forge_what_its_tests_find() {
        let tests = format!("assert {CANDIDATE}(3) == 6\nassert {CANDIDATE}(x=[1]) == [1, 1]");
        let judge = |body: &str| {
            let program = format!("def double(x):\n{body}");
            run_tests(&tests, &program, "double", &Limits::default())
        };
        assert_eq!(judge("    return 2 * x"), Ok(()));
        for forged in [
            "    class A:\n        def __eq__(self, o): return True\n        def __ne__(self, o): return False\n    return A()",
            "    class A:\n        def __eq__(self, o): return True\n    return [A()]",
            "    global function_under_test\n    function_under_test = lambda x: 6\n    return x",
            "    raise SystemExit(0)",
            "    '''",
        ] {
            assert!(judge(forged).is_err(), "{forged}");
        }
    }

    #[test]
    fn tests_may_expect_any_exception() {
        for kind in [
            "OSError",
            "MemoryError",
            "TimeoutError",
            "FileNotFoundError",
        ] {
            let program = format!("def f(x):\n    raise {kind}(x)");
            let tests = format!(
                "try:\n    {CANDIDATE}('text')\n    assert False\nexcept {kind} as error:\n    assert str(error) == 'text'"
            );
            let verdict = run_tests(&tests, &program, "f", &Limits::default());
            assert_eq!(verdict, Ok(()), "{kind}");
            assert_eq!(raised(&format!("raise {kind}('text')")), kind);
        }
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
