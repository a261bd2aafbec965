//! `powerinfer run -i`: a conversation on a terminal, or line by line from stdin.

use std::{
    fs,
    io::{BufRead, IsTerminal},
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{counted, write::write_file};
use powerinfer_pool::environment;
use powerinfer_text::{GenerationPrompt, Message, SpecialTokens, Tokenizer};
use rustyline::{
    Editor, Helper,
    completion::Completer,
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::FileHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};

use super::{RunArguments, Timing, Writer, rate, verification};
use crate::{
    hint::{self, Advised},
    output::{Output, print_data},
    progress::{interrupted, resume_after_interrupt, while_waiting},
    values::new_file,
};

/// The commands of a chat.
const HELP: &str = "\
/help           these commands; also `/?`
/reset          forget the conversation; also `/clear`
/system TEXT    start again with this system message; without TEXT, with none
/save FILE      write the conversation as JSON
/quit           end; also Ctrl-D, `/exit` and `/bye`

A line that ends in `\\` continues on the next line. Pasted text and text between `\"\"\"` may have several lines.
Ctrl-C stops an answer.";

/// Answers the `example`, if there is one, then messages until the input ends. With a chat template the messages are a
/// conversation; without one each is continued separately.
pub(super) fn run(writer: &mut Writer<'_>, mut example: Option<String>) -> Result<()> {
    let (arguments, tokenizer, output) = (writer.arguments, writer.tokenizer, writer.output);
    let template = tokenizer.chat_template();
    output.say(match template {
        Some(_) => "chat: a message a line; `/help` lists commands, Ctrl-D ends",
        None => "this model has no chat template: each line is a text to continue; `/help` lists commands, Ctrl-D ends",
    });
    let mut input = Input::open(output)?;
    let mut chat = Chat::default();
    let mut total = Timing::default();
    let mut answers = 0;
    if example.is_some() {
        output.say("an example:");
    }
    loop {
        let message = match example.take() {
            Some(example) => {
                print_data(&example)?;
                example
            }
            None => match input.read(output)? {
                Some(message) => message,
                None => break,
            },
        };
        if let Some(command) = Command::parse(&message) {
            match command {
                Command::Quit => break,
                Command::System(_) if template.is_none() => {
                    output.say("this model has no chat template, so system messages do not work");
                }
                command => {
                    if let Err(error) = chat.obey(command, output) {
                        let hint = hint::of(&error).map(|hint| format!("; {hint}"));
                        output.say(format!("{error:#}{}", hint.unwrap_or_default()));
                    }
                }
            }
            continue;
        }
        let plain = tokenizer.encode(&message, SpecialTokens::Add)?;
        chat.push("user", message);
        let ids = match template {
            Some(_) => encode(arguments, tokenizer, &chat.messages)?,
            None => plain,
        };
        let mut answer = String::new();
        let mut write = |piece: &str| {
            answer.push_str(piece);
            print_data(piece)
        };
        let fits = writer.check_prompt(ids.len());
        let answered = fits.and_then(|()| writer.respond(&ids, template.is_none(), &mut write));
        let timing = match answered {
            Ok(timing) => timing,
            // A message that does not fit ends neither the conversation nor the program.
            Err(error) if input.is_terminal() && answer.is_empty() => {
                chat.messages.pop();
                output.say(format!("{error:#}; `/reset` forgets the conversation"));
                continue;
            }
            Err(error) => return Err(error),
        };
        if !answer.ends_with('\n') {
            print_data("\n")?;
        }
        if interrupted() {
            resume_after_interrupt();
            output.say("stopped");
        }
        timing.note_limit(output);
        output.detail(timing.describe());
        verification::print_summary(writer.engine.observers().verification(), output);
        total.add(&timing);
        answers += 1;
        chat.push("assistant", answer);
    }
    if answers > 0 {
        output.say(format!(
            "{}: {}{}, prompts {} at {:.0} tokens/s",
            counted(answers, "answer"),
            counted(total.generated_tokens, "token"),
            total
                .decode_rate()
                .map_or_else(String::new, |rate| format!(" at {rate:.0} tokens/s")),
            counted(total.computed_tokens(), "token"),
            rate(total.computed_tokens(), total.prompt),
        ));
    }
    Ok(())
}

/// Tokens of the prompt that asks for an answer to `messages`, rendered with the model's chat template.
pub(super) fn encode(
    arguments: &RunArguments,
    tokenizer: &Tokenizer,
    messages: &[Message],
) -> Result<Vec<u32>> {
    let tokens = arguments.special_tokens.in_messages();
    let chat = tokenizer.render_chat(messages, GenerationPrompt::Add, tokens)?;
    Ok(tokenizer.encode_chat(&chat)?)
}

impl Timing {
    fn add(&mut self, other: &Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
        self.later_tokens += other.later_tokens;
        self.prompt += other.prompt;
        self.decode += other.decode;
    }
}

/// The conversation so far.
#[derive(Debug, Default)]
struct Chat {
    messages: Vec<Message>,
}

#[derive(Debug, PartialEq, Eq)]
enum Command<'a> {
    Help,
    Reset,
    System(&'a str),
    Save(&'a str),
    Quit,
    /// The name of an unknown command, and its argument.
    Unknown(&'a str, &'a str),
}

impl<'a> Command<'a> {
    /// The command in `line`; `None` for a message, which may begin with `//`.
    fn parse(line: &'a str) -> Option<Self> {
        let rest = line.trim_start().strip_prefix('/')?;
        if rest == "?" || rest.starts_with("? ") {
            return Some(Self::Help);
        }
        if !rest.starts_with(|first: char| first.is_ascii_alphabetic()) {
            return None;
        }
        let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let argument = argument.trim();
        Some(match name {
            "help" => Self::Help,
            "reset" | "clear" => Self::Reset,
            "system" => Self::System(argument),
            "save" => Self::Save(argument),
            "quit" | "exit" | "bye" => Self::Quit,
            name => Self::Unknown(name, argument),
        })
    }
}

impl Chat {
    fn push(&mut self, role: &str, content: String) {
        let role = role.to_owned();
        self.messages.push(Message { role, content });
    }

    fn obey(&mut self, command: Command<'_>, output: Output) -> Result<()> {
        match command {
            Command::Help | Command::Quit => output.say(HELP),
            Command::Reset => {
                self.messages.retain(|message| message.role == "system");
                output.say("the conversation is forgotten");
            }
            Command::System(text) => {
                self.messages.clear();
                if !text.is_empty() {
                    self.push("system", text.to_owned());
                }
                output.say("the conversation starts again");
            }
            Command::Save("") => bail!("`/save` takes a file"),
            Command::Save(file) => {
                let mut file = new_file(file).map_err(anyhow::Error::msg)?;
                // A bare name would hide the prepared model of that name.
                if file.extension().is_none() {
                    file.set_extension("json");
                }
                if file.exists() {
                    bail!(Advised::new(
                        format!("`{}` exists", file.display()),
                        "name another file"
                    ));
                }
                write_file(&file, &serde_json::to_vec_pretty(&self.messages)?)?;
                output.say(format!("saved the chat to `{}` as JSON", file.display()));
            }
            Command::Unknown(name, argument) => bail!(Advised::new(
                format!("there is no command `/{name}`"),
                instead_of(name, argument)
            )),
        }
        Ok(())
    }
}

/// Advice on how to do here what Ollama's command `/name argument` does.
fn instead_of(name: &str, argument: &str) -> &'static str {
    match (name, argument.split_whitespace().next()) {
        ("set", Some("system")) => "`/system TEXT` sets the system message",
        ("set", Some("verbose")) => "`powerinfer run MODEL -v` shows speeds after each answer",
        ("set", Some("parameter")) => {
            "`--temperature`, `--top-k`, `--top-p`, `--min-p`, `--repeat-penalty`, `--seed` and `-n` of `powerinfer run` set parameters"
        }
        ("set", _) => "PowerInfer has no such setting; `powerinfer help run` lists its options",
        ("show", Some("info") | None) => "`powerinfer show MODEL` describes the model",
        ("show", _) => {
            "`/api/show` of `powerinfer serve` returns the chat template; the parameters are the options of `powerinfer run`"
        }
        ("load", _) => {
            "files written by `/save` cannot be loaded; `powerinfer run MODEL` runs a model"
        }
        _ => "`/help` lists them",
    }
}

/// Source of messages.
enum Input {
    Terminal(Box<Editor<Lines, FileHistory>>, Option<PathBuf>),
    Stdin,
}

/// Reads further lines after one that ends in `\`, and between `"""`.
struct Lines;

/// Delimiter of text of several lines.
const QUOTES: &str = "\"\"\"";

/// Whether the message `text` is still incomplete.
fn continues(text: &str) -> bool {
    match text.strip_prefix(QUOTES) {
        Some(quoted) => !quoted.contains(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The message that was typed as `text`.
fn message(text: &str) -> String {
    match text.strip_prefix(QUOTES) {
        Some(quoted) => quoted.replacen(QUOTES, "", 1).trim_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

impl Helper for Lines {}
impl Highlighter for Lines {}

impl Hinter for Lines {
    type Hint = String;
}

impl Completer for Lines {
    type Candidate = String;
}

impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if continues(context.input()) {
            ValidationResult::Incomplete
        } else {
            ValidationResult::Valid(None)
        })
    }
}

impl Input {
    fn open(output: Output) -> Result<Self> {
        if !std::io::stdin().is_terminal() || output.quiet {
            return Ok(Self::Stdin);
        }
        let mut editor = Editor::new().context("cannot read the terminal")?;
        editor.set_helper(Some(Lines));
        let history = environment::cache_folder().map(|folder| folder.join("chat_history"));
        if let Some(file) = &history {
            // There is none at first.
            let _ = editor.load_history(file);
        }
        Ok(Self::Terminal(Box::new(editor), history))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// The next message that is not empty; `None` at the end.
    fn read(&mut self, output: Output) -> Result<Option<String>> {
        loop {
            let message = match self {
                Self::Stdin => read_lines()?,
                Self::Terminal(editor, _) => match while_waiting(|| editor.readline("> ")) {
                    Ok(line) => Some(message(&line)),
                    // Ctrl-C empties the line.
                    Err(ReadlineError::Interrupted) => {
                        output.say("Ctrl-D or `/quit` ends the chat");
                        continue;
                    }
                    Err(ReadlineError::Eof) => None,
                    Err(error) => return Err(error).context("cannot read the terminal"),
                },
            };
            let Some(message) = message else {
                return Ok(None);
            };
            if message.trim().is_empty() {
                continue;
            }
            if let Self::Terminal(editor, history) = self {
                editor.add_history_entry(message.as_str())?;
                // A chat does not depend on its history.
                if let Some(file) = history {
                    let folder = file.parent().map(fs::create_dir_all);
                    let _ = folder.map(|_| editor.append_history(file));
                }
            }
            return Ok(Some(message));
        }
    }
}

/// Reads a message from stdin: one line, or more while it [continues]; `None` at the end.
fn read_lines() -> Result<Option<String>> {
    let mut text = String::new();
    loop {
        let mut line = String::new();
        let read = while_waiting(|| std::io::stdin().lock().read_line(&mut line))
            .context("cannot read stdin")?;
        if read == 0 {
            return Ok((!text.is_empty()).then(|| message(&text)));
        }
        let line = line.trim_end_matches(['\n', '\r']);
        text.push_str(line.strip_prefix('\u{feff}').unwrap_or(line));
        if !continues(&text) {
            return Ok(Some(message(&text)));
        }
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_begin_with_a_slash_and_a_letter() {
        assert_eq!(
            Command::parse("/system  Be brief. "),
            Some(Command::System("Be brief."))
        );
        assert_eq!(Command::parse("/save"), Some(Command::Save("")));
        for end in ["/quit", "/exit", "/bye"] {
            assert_eq!(Command::parse(end), Some(Command::Quit));
        }
        let unknown = Command::Unknown("halp", "me");
        assert_eq!(Command::parse("/halp me"), Some(unknown));
        assert_eq!(Command::parse(" /?"), Some(Command::Help));
        assert_eq!(Command::parse("/? set"), Some(Command::Help));
        for message in ["// a comment", "/", "a /quit", "/* x */", ""] {
            assert_eq!(Command::parse(message), None, "{message}");
        }
    }

    #[test]
    fn commands_of_ollama_name_ours() {
        for (line, part) in [
            ("/set system Be brief.", "`/system TEXT`"),
            ("/set parameter top_k 1", "`--top-k`"),
            ("/set nohistory", "no such setting"),
            ("/show template", "`/api/show`"),
            ("/set verbose", "`powerinfer run MODEL -v`"),
            ("/show info", "`powerinfer show MODEL`"),
            ("/load other", "cannot be loaded"),
            ("/halp", "`/help`"),
        ] {
            let Some(Command::Unknown(name, argument)) = Command::parse(line) else {
                panic!("{line} is known");
            };
            assert!(instead_of(name, argument).contains(part), "{line}");
        }
    }

    #[test]
    fn messages_of_several_lines() {
        for (text, whole) in [
            ("one", "one"),
            ("one\\\ntwo", "one\ntwo"),
            ("\"\"\"one\n two\"\"\"", "one\n two"),
            ("\"\"\"\none\n\"\"\"", "one"),
        ] {
            assert!(!continues(text), "{text}");
            assert_eq!(message(text), whole);
        }
        for begun in ["one\\", "\"\"\"", "\"\"\"one\ntwo"] {
            assert!(continues(begun), "{begun}");
        }
    }
}
