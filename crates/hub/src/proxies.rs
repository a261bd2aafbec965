//! Proxies from `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY`.

use url::Url;

/// The proxies of the environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Proxies {
    /// For addresses of `https`.
    pub(crate) https: Option<String>,
    /// For addresses of `http`.
    pub(crate) http: Option<String>,
    /// Hosts that are reached directly, with their subdomains; `*` for all.
    except: Vec<String>,
}

impl Proxies {
    /// Proxies from the variables in `lookup`, lower-case names first.
    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| lookup(&name.to_ascii_lowercase()).or_else(|| lookup(name));
        let all = either("ALL_PROXY");
        let except = either("NO_PROXY").unwrap_or_default();
        Self {
            https: either("HTTPS_PROXY").or_else(|| all.clone()),
            http: either("HTTP_PROXY").or(all),
            except: except
                .split(',')
                .map(|host| host.trim().trim_start_matches('.').to_ascii_lowercase())
                .filter(|host| !host.is_empty())
                .collect(),
        }
    }

    /// Whether `address` is reached directly.
    pub(crate) fn bypass(&self, address: &Url) -> bool {
        let host = address.host_str().unwrap_or_default().to_ascii_lowercase();
        self.except.iter().any(|except| {
            except == "*"
                || host
                    .strip_suffix(except.as_str())
                    .is_some_and(|front| front.is_empty() || front.ends_with('.'))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_in_no_proxy_are_reached_directly() {
        let variables = |name: &str| match name {
            "ALL_PROXY" => Some("http://all:1".to_owned()),
            "https_proxy" => Some("http://secure:2".to_owned()),
            "NO_PROXY" => Some("localhost, .intern.org,127.0.0.1".to_owned()),
            _ => None,
        };
        let proxies = Proxies::from_lookup(variables);
        assert_eq!(proxies.https.as_deref(), Some("http://secure:2"));
        assert_eq!(proxies.http.as_deref(), Some("http://all:1"));
        for (address, direct) in [
            ("http://localhost:80/x", true),
            ("https://hub.intern.org", true),
            ("https://intern.org", true),
            ("https://notintern.org", false),
            ("http://127.0.0.1:9", true),
            ("https://huggingface.co", false),
        ] {
            assert_eq!(proxies.bypass(&Url::parse(address).unwrap()), direct);
        }
    }
}
