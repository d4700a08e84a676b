//! A Rust source as tokens: enough of the language to find paths, definitions and attributes without
//! being misled by comments, strings and test code.

use std::collections::BTreeMap;

/// One word or sign.
#[derive(Clone, Debug)]
pub struct Token {
    pub text: String,
    /// Counted from 1.
    pub line: usize,
}

/// One file of the crate.
pub struct Source {
    /// Below its folder, with `/`: `cache/index.rs`.
    pub path: String,
    pub text: String,
    /// Every token, comments and strings left out.
    pub tokens: Vec<Token>,
    /// The tokens that are compiled outside tests too.
    pub code: Vec<Token>,
    /// The comments of each line.
    pub comments: BTreeMap<usize, String>,
    /// The modules in files of their own that are declared for tests alone.
    test_modules: Vec<String>,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        let mut lexer = Lexer { chars: text.chars().collect(), at: 0, line: 1, comments: BTreeMap::new() };
        let tokens = lexer.tokens();
        let (code, test_modules) = without_tests(&tokens);
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
            tokens,
            code,
            comments: lexer.comments,
            test_modules,
        }
    }

    /// Empties the code of every file that another declares for tests alone.
    pub fn leave_out_test_files(sources: &mut [Self]) {
        let mut test_files = Vec::new();
        for source in sources.iter() {
            let parent = source.module();
            test_files
                .extend(source.test_modules.iter().map(|name| [&parent[..], &[name]].concat().join("/")));
        }
        for source in sources {
            let module = source.module().join("/");
            if test_files.iter().any(|file| module == *file || module.starts_with(&format!("{file}/"))) {
                source.code.clear();
            }
        }
    }

    /// The modules that lead to this file: `cache/index.rs` is `[cache, index]`, `lib.rs` is `[]`.
    pub fn module(&self) -> Vec<&str> {
        let mut parts: Vec<&str> = self.path.trim_end_matches(".rs").split('/').collect();
        if matches!(parts.last(), Some(&"mod" | &"lib" | &"main")) {
            parts.pop();
        }
        parts
    }

    /// Whether a comment that `proves` stands on the line, or right above the statement it is part of.
    pub fn has_comment_beside(&self, line: usize, proves: impl Fn(&str) -> bool) -> bool {
        let holds = |line: usize| self.comments.get(&line).is_some_and(|comment| proves(comment));
        if holds(line) {
            return true;
        }
        let lines: Vec<&str> = self.text.lines().map(str::trim).collect();
        for above in (1..line).rev() {
            let text = lines[above - 1];
            if text.starts_with("//") {
                let block = (1..=above).rev().take_while(|&l| lines[l - 1].starts_with("//"));
                return block.into_iter().any(holds);
            }
            if text.is_empty() || text.ends_with([';', '{', '}']) {
                return false;
            }
        }
        false
    }
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
    comments: BTreeMap<usize, String>,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn next(&mut self) -> char {
        let c = self.peek(0);
        self.line += usize::from(c == '\n');
        self.at += 1;
        c
    }

    fn tokens(&mut self) -> Vec<Token> {
        let mut tokens = Vec::new();
        while self.at < self.chars.len() {
            let line = self.line;
            if let Some(text) = self.token() {
                tokens.push(Token { text, line });
            }
        }
        tokens
    }

    /// Steps over one thing; comments, strings and space are none.
    fn token(&mut self) -> Option<String> {
        match (self.peek(0), self.peek(1)) {
            ('/', '/') => self.line_comment(),
            ('/', '*') => self.block_comment(),
            ('"', _) => self.string(),
            ('\'', _) => self.quote(),
            (':', ':') => {
                self.at += 2;
                return Some("::".to_owned());
            }
            (c, _) if c.is_alphanumeric() || c == '_' => return self.word(),
            (c, _) if c.is_whitespace() => {
                self.next();
            }
            _ => return Some(self.next().to_string()),
        }
        None
    }

    fn word(&mut self) -> Option<String> {
        let mut word = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            word.push(self.next());
        }
        let raw = matches!(word.as_str(), "r" | "br" | "cr");
        match self.peek(0) {
            '"' if raw => self.raw_string(),
            '#' if raw && matches!(self.peek(1), '#' | '"') => self.raw_string(),
            '"' if matches!(word.as_str(), "b" | "c") => self.string(),
            '\'' if word == "b" => self.quote(),
            _ => return Some(word),
        }
        None
    }

    fn note(&mut self, line: usize, text: &str) {
        self.comments.entry(line).or_default().push_str(text);
    }

    fn line_comment(&mut self) {
        let mut text = String::new();
        while self.at < self.chars.len() && self.peek(0) != '\n' {
            text.push(self.next());
        }
        self.note(self.line, &text);
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        while self.at < self.chars.len() {
            let (here, pair) = (self.line, (self.peek(0), self.peek(1)));
            depth += i32::from(pair == ('/', '*')) - i32::from(pair == ('*', '/'));
            if matches!(pair, ('/', '*') | ('*', '/')) {
                self.at += 1;
            }
            let c = self.next();
            self.note(here, &c.to_string());
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) {
        self.next();
        while self.at < self.chars.len() {
            match self.next() {
                '\\' => {
                    self.next();
                }
                '"' => return,
                _ => {}
            }
        }
    }

    fn raw_string(&mut self) {
        let mut hashes = 0;
        while self.peek(0) == '#' {
            hashes += 1;
            self.next();
        }
        self.next();
        while self.at < self.chars.len() {
            if self.next() == '"' && (0..hashes).all(|i| self.peek(i) == '#') {
                self.at += hashes;
                return;
            }
        }
    }

    /// A character literal, or the mark of a lifetime.
    fn quote(&mut self) {
        self.next();
        if self.peek(0) == '\\' {
            self.at += 2;
            while self.at < self.chars.len() && self.next() != '\'' {}
        } else if self.peek(1) == '\'' {
            self.at += 2;
        }
    }
}

/// Leaves out every item under `#[test]` or a `#[cfg(..)]` that asks for `test`, and names those that
/// are modules in files of their own.
fn without_tests(tokens: &[Token]) -> (Vec<Token>, Vec<String>) {
    let (mut code, mut test_modules) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        let text = |i: usize| tokens.get(i).map_or("", |t| t.text.as_str());
        if text(at) == "#" && text(at + 1) == "[" {
            let end = closing(tokens, at + 1);
            if asks_for_test(&tokens[at + 2..end]) {
                at = end_of_item(tokens, end + 1);
                if at >= 3 && text(at - 3) == "mod" && text(at - 1) == ";" {
                    test_modules.push(text(at - 2).to_owned());
                }
                continue;
            }
        }
        code.push(tokens[at].clone());
        at += 1;
    }
    (code, test_modules)
}

fn asks_for_test(attribute: &[Token]) -> bool {
    let words: Vec<&str> = attribute.iter().map(|t| t.text.as_str()).collect();
    let negated = words.windows(3).any(|w| w == ["not", "(", "test"]);
    words == ["test"] || (words.first() == Some(&"cfg") && words.contains(&"test") && !negated)
}

/// Where the bracket that opens at `at` is closed.
fn closing(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(at) {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i;
        }
    }
    tokens.len()
}

/// One past the item that begins at `at`: its body, or its semicolon.
fn end_of_item(tokens: &[Token], mut at: usize) -> usize {
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            ";" => return at + 1,
            "{" => return closing(tokens, at) + 1,
            "(" | "[" => at = closing(tokens, at),
            _ => {}
        }
        at += 1;
    }
    at
}

/// Every path of two segments or more, and every leaf of every `use`, with its line.
pub fn paths(tokens: &[Token]) -> Vec<(Vec<String>, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let line = tokens[at].line;
        if tokens[at].text == "use" {
            at = use_tree(tokens, at + 1, &[], &mut found);
        } else {
            let end = path_end(tokens, at);
            let joined = at > 0 && matches!(tokens[at - 1].text.as_str(), "::" | ".");
            if end > at + 1 && !joined {
                let path = tokens[at..end].iter().filter(|t| t.text != "::").map(|t| t.text.clone());
                found.push((path.collect(), line));
            }
            at = end.max(at + 1);
        }
    }
    found
}

fn is_word(token: Option<&Token>) -> bool {
    token.is_some_and(|t| t.text.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// One past `word(::word)*`, or `at` where there is none.
fn path_end(tokens: &[Token], mut at: usize) -> usize {
    if !is_word(tokens.get(at)) {
        return at;
    }
    at += 1;
    while tokens.get(at).is_some_and(|t| t.text == "::") && is_word(tokens.get(at + 1)) {
        at += 2;
    }
    at
}

/// Reads one branch of a `use`, pushing its leaves; gives where it ends.
fn use_tree(
    tokens: &[Token],
    mut at: usize,
    prefix: &[String],
    found: &mut Vec<(Vec<String>, usize)>,
) -> usize {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(at) {
        match token.text.as_str() {
            "{" => {
                while tokens.get(at).is_some_and(|t| t.text != "}") {
                    at = use_tree(tokens, at + 1, &path, found);
                }
                return at + 1;
            }
            "," | "}" | ";" => break,
            "as" => at += 1,
            "::" => {}
            word => path.push(word.to_owned()),
        }
        at += 1;
    }
    if path.len() > prefix.len() {
        let line = tokens[at.min(tokens.len()) - 1].line;
        found.push((path, line));
    }
    at
}
