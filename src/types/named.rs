//! Names of the variants of enumerations.

/// Gives an enumeration `ALL` and `name`; with an error for unknown names, also `names`, `Display` and
/// `FromStr`.
macro_rules! named {
    ($type:ident: $($variant:ident = $name:literal),+) => {
        impl $type {
            /// All of them, in order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Its name in text.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }
    };
    ($type:ident: $($variant:ident = $name:literal),+; $error:ty = $unknown:expr) => {
        $crate::types::named!($type: $($variant = $name),+);

        impl $type {
            /// All names, as a list in a sentence.
            pub(crate) fn names() -> String {
                let names = Self::ALL.map(Self::name);
                let (last, others) = (names[names.len() - 1], &names[..names.len() - 1]);
                format!("{} or {last}", others.join(", "))
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $error;

            fn from_str(name: &str) -> Result<Self, $error> {
                let found = Self::ALL.into_iter().find(|each| each.name() == name);
                found.ok_or_else(|| $unknown(name.to_owned()))
            }
        }
    };
}
pub(crate) use named;
