//! `powerinfer run -i`: a conversation on a terminal, or line by line from stdin.

use std::{
    fs,
    io::{BufRead, IsTerminal},
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{counted, write::write_file};
use powerinfer_pool::environment;
use powerinfer_text::{GenerationPrompt, Message, SpecialTokens};
use rustyline::{
    Editor, Helper,
    completion::Completer,
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::FileHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};

use super::{Timing, Writer, rate, verification};
use crate::{
    hint::Advised,
    output::{Output, print_data},
    progress::{interrupted, resume_after_interrupt, while_waiting},
    values::new_file,
};

/// The commands of a chat.
const HELP: &str = "\
/help           these commands
/reset          forget the conversation
/system TEXT    start again with this system message; without TEXT with none
/save FILE      write the conversation as JSON
/quit           end, as Ctrl-D, `/exit` and `/bye` do

A line that ends in `\\` continues on the next line, and pasted text may have several lines. Ctrl-C stops an answer.";

/// Answers messages until the input ends. With a chat template the messages are a conversation; without one each is
/// continued separately.
pub(super) fn run(writer: &mut Writer<'_>) -> Result<()> {
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
    while let Some(message) = input.read()? {
        if let Some(command) = Command::parse(&message) {
            match command {
                Command::Quit => break,
                command => {
                    let is_system = matches!(command, Command::System(_));
                    match chat.obey(command, output) {
                        Err(error) => output.say(format!("{error:#}")),
                        Ok(()) if is_system && template.is_none() => output
                            .say("this model has no chat template: the system message is not used"),
                        Ok(()) => {}
                    }
                }
            }
            continue;
        }
        let plain = tokenizer.encode(&message, SpecialTokens::Add)?;
        chat.push("user", message);
        let ids = match template {
            Some(_) => {
                let tokens = arguments.special_tokens.in_messages();
                let chat = tokenizer.render_chat(&chat.messages, GenerationPrompt::Add, tokens)?;
                tokenizer.encode_chat(&chat)?
            }
            None => plain,
        };
        let mut answer = String::new();
        let mut write = |piece: &str| {
            answer.push_str(piece);
            print_data(piece)
        };
        let fits = writer.check_prompt(ids.len());
        let answered = fits.and_then(|()| writer.respond(&ids, &mut write));
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
            "{}: {} at {:.0} tokens/s, prompts {} at {:.0} tokens/s",
            counted(answers, "answer"),
            counted(total.generated_tokens, "token"),
            rate(total.generated_tokens, total.decode),
            counted(total.computed_tokens(), "token"),
            rate(total.computed_tokens(), total.prompt),
        ));
    }
    Ok(())
}

impl Timing {
    fn add(&mut self, other: &Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
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
    Unknown(&'a str),
}

impl<'a> Command<'a> {
    /// The command in `line`; `None` for a message, which may begin with `//`.
    fn parse(line: &'a str) -> Option<Self> {
        let rest = line.strip_prefix('/')?;
        if !rest.starts_with(|first: char| first.is_ascii_alphabetic()) {
            return None;
        }
        let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let argument = argument.trim();
        Some(match name {
            "help" => Self::Help,
            "reset" => Self::Reset,
            "system" => Self::System(argument),
            "save" => Self::Save(argument),
            "quit" | "exit" | "bye" => Self::Quit,
            name => Self::Unknown(name),
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
                let file = new_file(file).map_err(anyhow::Error::msg)?;
                if file.exists() {
                    bail!(Advised::new(
                        format!("`{}` exists", file.display()),
                        "name another file"
                    ));
                }
                write_file(&file, &serde_json::to_vec_pretty(&self.messages)?)?;
                output.say(format!("written to `{}`", file.display()));
            }
            Command::Unknown(name) => bail!(Advised::new(
                format!("there is no command `/{name}`"),
                "`/help` lists them"
            )),
        }
        Ok(())
    }
}

/// Source of messages.
enum Input {
    Terminal(Box<Editor<Lines, FileHistory>>, Option<PathBuf>),
    Stdin,
}

/// Continues lines that end in `\`.
struct Lines;

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
        Ok(if context.input().ends_with('\\') {
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
    fn read(&mut self) -> Result<Option<String>> {
        loop {
            let message = match self {
                Self::Stdin => read_lines()?,
                Self::Terminal(editor, _) => match while_waiting(|| editor.readline("> ")) {
                    Ok(line) => Some(line.replace("\\\n", "\n")),
                    // Ctrl-C empties the line.
                    Err(ReadlineError::Interrupted) => continue,
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

/// A line of stdin, with the following ones while they end in `\`; `None` at the end.
fn read_lines() -> Result<Option<String>> {
    let mut message = String::new();
    loop {
        let mut line = String::new();
        let read = while_waiting(|| std::io::stdin().lock().read_line(&mut line))
            .context("cannot read stdin")?;
        if read == 0 {
            return Ok((!message.is_empty()).then_some(message));
        }
        let line = line.trim_end_matches(['\n', '\r']);
        let line = line.strip_prefix('\u{feff}').unwrap_or(line);
        match line.strip_suffix('\\') {
            Some(part) => {
                message.push_str(part);
                message.push('\n');
            }
            None => {
                message.push_str(line);
                return Ok(Some(message));
            }
        }
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
        assert_eq!(Command::parse("/halp me"), Some(Command::Unknown("halp")));
        for message in ["// a comment", "/", "a /quit", "/* x */", ""] {
            assert_eq!(Command::parse(message), None, "{message}");
        }
    }
}
