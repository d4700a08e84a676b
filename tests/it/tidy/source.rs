//! A parsed Rust file for the rules. `syn` gives its paths. Rules about single words use tokens, because
//! `syn` does not parse the arguments of macros. The text without the tokens gives the comments.

use std::collections::BTreeMap;
use std::path::Path;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// A word, a sign or a literal.
pub struct Token {
    pub text: String,
    /// Counted from 1.
    pub line: usize,
}

/// A path with two or more segments, or one path of a `use` item, and its line.
pub type PathAt = (Vec<String>, usize);

/// A Rust file of `src/`, `tests/` or `benches/`.
pub struct Source {
    /// Path below its folder, with `/`: `cache/index.rs`.
    pub path: String,
    pub text: String,
    /// All tokens.
    pub tokens: Vec<Token>,
    /// The tokens that are compiled outside tests too.
    pub code: Vec<Token>,
    /// The paths in `code`.
    pub paths: Vec<PathAt>,
    /// The comments of each line.
    comments: BTreeMap<usize, String>,
    /// Modules in other files that this file declares for tests only.
    test_modules: Vec<String>,
}

impl Source {
    /// # Panics
    /// When the text is not a Rust file.
    pub fn new(path: &str, text: &str) -> Self {
        let stream: TokenStream = text.parse().unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut test_modules = Vec::new();
        let code = without_tests(stream.clone(), &mut test_modules);
        let file = syn::parse2(code.clone())
            .unwrap_or_else(|error| panic!("{path}:{}: {error}", error.span().start().line));
        let mut paths = Paths::default();
        paths.visit_file(&file);
        Self {
            path: path.to_owned(),
            text: text.to_owned(),
            comments: comments(text, stream.clone()),
            tokens: flat(stream),
            code: flat(code),
            paths: paths.0,
            test_modules,
        }
    }

    /// Every Rust file below `folder`, sorted by path.
    pub fn all(folder: &str) -> Vec<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let files = walkdir::WalkDir::new(&root).sort_by_file_name().into_iter().map(Result::unwrap);
        let rust = files.filter(|file| file.path().extension().is_some_and(|extension| extension == "rs"));
        let mut sources: Vec<Self> = rust
            .map(|file| {
                let name = file.path().strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
                Self::new(&name, &std::fs::read_to_string(file.path()).unwrap())
            })
            .collect();
        Self::leave_out_test_files(&mut sources);
        sources
    }

    /// Empties `code` and `paths` of every file that its parent module declares for tests only.
    pub fn leave_out_test_files(sources: &mut [Self]) {
        let declared = |source: &Self| {
            let parent = source.module().join("/");
            let files = source.test_modules.iter().map(move |name| format!("{parent}/{name}"));
            files.map(|file| file.trim_start_matches('/').to_owned()).collect::<Vec<_>>()
        };
        let test_files: Vec<String> = sources.iter().flat_map(declared).collect();
        for source in sources {
            let module = source.module().join("/");
            if test_files.iter().any(|file| module == *file || module.starts_with(&format!("{file}/"))) {
                source.code.clear();
                source.paths.clear();
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

    /// Whether `proves` accepts a comment on the line or directly above the statement of the line.
    pub fn has_comment_beside(&self, line: usize, proves: impl Fn(&str) -> bool) -> bool {
        let holds = |line: usize| self.comments.get(&line).is_some_and(|comment| proves(comment));
        let lines: Vec<&str> = self.text.lines().map(str::trim).collect();
        let is_comment = |line: &usize| lines[line - 1].starts_with("//");
        let ends_statement = |line: &usize| {
            let text = lines[line - 1];
            text.is_empty() || text.ends_with([';', '{', '}']) || text.starts_with("//")
        };
        let above = (1..line).rev().find(ends_statement).unwrap_or(0);
        holds(line) || (1..=above).rev().take_while(is_comment).any(holds)
    }
}

/// All tokens of a stream, with the tokens and brackets of its groups.
fn flat(stream: TokenStream) -> Vec<Token> {
    let mut tokens = Vec::new();
    for tree in stream {
        let mut push = |text: &str, span: proc_macro2::Span| {
            tokens.push(Token { text: text.to_owned(), line: span.start().line });
        };
        let TokenTree::Group(group) = &tree else {
            push(&tree.to_string(), tree.span());
            continue;
        };
        let (open, close) = match group.delimiter() {
            Delimiter::Parenthesis => ("(", ")"),
            Delimiter::Brace => ("{", "}"),
            Delimiter::Bracket => ("[", "]"),
            Delimiter::None => ("", ""),
        };
        push(open, group.span_open());
        tokens.extend(flat(group.stream()));
        tokens.push(Token { text: close.to_owned(), line: group.span_close().start().line });
    }
    tokens
}

/// The comments of each line: what remains of the text when all tokens are blanked out.
fn comments(text: &str, stream: TokenStream) -> BTreeMap<usize, String> {
    fn blank(text: &mut [u8], stream: TokenStream) {
        for tree in stream {
            let spans = match &tree {
                TokenTree::Group(group) => {
                    blank(text, group.stream());
                    vec![group.span_open(), group.span_close()]
                }
                tree => vec![tree.span()],
            };
            for byte in spans.into_iter().flat_map(|span| span.byte_range()) {
                text[byte] = if text[byte] == b'\n' { b'\n' } else { b' ' };
            }
        }
    }
    let mut bytes = text.as_bytes().to_vec();
    blank(&mut bytes, stream);
    let rest = String::from_utf8_lossy(&bytes);
    let lines = rest.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(i, line)| (i + 1, line.trim().to_owned())).collect()
}

/// The stream without the items under `#[test]` or under a `#[cfg(..)]` that requires `test`. Adds the names
/// of those that are modules in other files to `test_modules`.
fn without_tests(stream: TokenStream, test_modules: &mut Vec<String>) -> TokenStream {
    let mut kept = Vec::new();
    let mut trees = stream.into_iter().peekable();
    while trees.peek().is_some() {
        let (mut attributes, mut for_tests) = (Vec::new(), false);
        while let Some(sign) = trees.next_if(|tree| is_sign(tree, "#")) {
            attributes.push(sign);
            if let Some(TokenTree::Group(attribute)) = trees.peek() {
                for_tests |= requires_test(attribute.stream());
                attributes.extend(trees.next());
            }
        }
        if !for_tests {
            kept.extend(attributes);
            kept.extend(trees.next().map(|tree| match tree {
                TokenTree::Group(group) => {
                    let mut inner =
                        Group::new(group.delimiter(), without_tests(group.stream(), test_modules));
                    inner.set_span(group.span());
                    inner.into()
                }
                tree => tree,
            }));
            continue;
        }
        let mut words = Vec::new();
        for tree in trees.by_ref() {
            words.push(tree.to_string());
            let is_body = matches!(&tree, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
            if is_body || is_sign(&tree, ";") {
                break;
            }
        }
        // The end of a statement or match arm whose body was a block.
        trees.next_if(|tree| is_sign(tree, ";,"));
        if let [.., keyword, name, end] = &words[..]
            && (keyword.as_str(), end.as_str()) == ("mod", ";")
        {
            test_modules.push(name.clone());
        }
    }
    kept.into_iter().collect()
}

fn is_sign(tree: &TokenTree, signs: &str) -> bool {
    matches!(tree, TokenTree::Punct(sign) if signs.contains(sign.as_char()))
}

fn requires_test(attribute: TokenStream) -> bool {
    let tokens = flat(attribute);
    let words: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
    let negated = words.windows(3).any(|three| three == ["not", "(", "test"]);
    words == ["test"] || (words.first() == Some(&"cfg") && words.contains(&"test") && !negated)
}

#[derive(Default)]
struct Paths(Vec<PathAt>);

impl Paths {
    fn add_use(&mut self, tree: &syn::UseTree, mut path: Vec<String>) {
        let (leaf, span) = match tree {
            syn::UseTree::Path(next) => {
                path.push(next.ident.to_string());
                return self.add_use(&next.tree, path);
            }
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_use(tree, path.clone()));
            }
            syn::UseTree::Name(name) => (name.ident.to_string(), name.ident.span()),
            syn::UseTree::Rename(name) => (name.ident.to_string(), name.ident.span()),
            syn::UseTree::Glob(glob) => ("*".to_owned(), glob.star_token.span),
        };
        path.push(leaf);
        self.0.push((path, span.start().line));
    }

    /// Adds the paths in tokens that `syn` does not parse, which are those of macros and attributes.
    fn add_tokens(&mut self, stream: TokenStream) {
        let tokens = flat(stream);
        let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
        let is_word = |at: usize| text(at).starts_with(|c: char| c.is_alphabetic() || c == '_');
        let mut at = 0;
        while at < tokens.len() {
            let first = at;
            let mut path = vec![text(at).to_owned()];
            while is_word(at) && text(at + 1) == ":" && text(at + 2) == ":" && is_word(at + 3) {
                at += 3;
                path.push(text(at).to_owned());
            }
            let continues = first > 0 && matches!(text(first - 1), ":" | ".");
            if path.len() > 1 && !continues {
                self.0.push((path, tokens[first].line));
            }
            at += 1;
        }
    }
}

impl<'a> Visit<'a> for Paths {
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        self.add_use(&item.tree, Vec::new());
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if path.segments.len() > 1 {
            let names = path.segments.iter().map(|segment| segment.ident.to_string());
            self.0.push((names.collect(), path.segments[0].ident.span().start().line));
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'a syn::Macro) {
        self.visit_path(&call.path);
        self.add_tokens(call.tokens.clone());
    }

    fn visit_meta_list(&mut self, list: &'a syn::MetaList) {
        self.visit_path(&list.path);
        self.add_tokens(list.tokens.clone());
    }
}
