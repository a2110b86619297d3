// Package config loads the settings of fsb-ctl: flags override the environment, which overrides the configuration file, which
// overrides the defaults. It records the source of each setting. It does no I/O except reading the file, and never writes.
// Its functions are safe for concurrent use.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Settings are the settings of every command.
type Settings struct {
	// Addr is the allocator's gRPC target.
	Addr string
	// TLS of the connection.
	TLS rpc.TLS
	// TokenFile is the file of a bearer token, token the token itself. Both empty: the certificate says who calls.
	TokenFile, token string
	// Namespace is that of sandboxes and pools. Pool is that of new sandboxes; empty means the namespace's default pool.
	Namespace, Pool string
	// Output is the output format; empty means that of the command.
	Output string
	// Timeout bounds each call with its retries.
	Timeout time.Duration
	// File is the configuration file that was read; empty if none was.
	File string
	// Values are all settings with their sources.
	Values []Value
}

// Value is one setting with its source.
type Value struct {
	// Key is the name of the setting in the file, and of its flag.
	Key string
	// Value as text.
	Value string
	// Source is `flag --addr`, `environment FSB_ADDR`, `file <path>` or `default`.
	Source string
}

const (
	fileFlag = "config"
	fileEnv  = "FSB_CONFIG"
)

// key is the name of one setting, in the file, as a flag and (as FSB_NAME) as an environment variable.
type key struct{ name, fallback string }

func keys() []key {
	return []key{
		{"addr", "127.0.0.1:9090"},
		{"cacert", ""},
		{"cert", ""},
		{"key", ""},
		{"token-file", ""},
		{"insecure", "false"},
		{"namespace", "default"},
		{"pool", ""},
		{"output", ""},
		{"timeout", "1m"},
	}
}

// paths are the settings that are paths. In the configuration file they may be relative to it.
var paths = [...]string{"cacert", "cert", "key", "token-file"}

// EnvName returns the environment variable of a setting.
func EnvName(key string) string { return "FSB_" + strings.ToUpper(strings.ReplaceAll(key, "-", "_")) }

// tokenEnv is the environment variable of a bearer token. It takes precedence over a file. There is no flag and no setting in the
// file: other users of the machine can read the arguments of a process.
const tokenEnv = "FSB_TOKEN"

// DefaultFile returns the path of the configuration file if none is set; empty if there is no home directory.
func DefaultFile() string {
	dir, err := os.UserConfigDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "fast-sandbox", "config.yaml")
}

// AddFlags adds the flags of every command. --pool is not among them: it has another meaning for run than for list.
func AddFlags(fs *pflag.FlagSet) {
	fs.String(fileFlag, "", "configuration `file` [$FSB_CONFIG] (default: fast-sandbox/config.yaml in the user's configuration directory)")
	fs.String("addr", "", "`host:port` of the gateway's gRPC port, or of an allocator [$FSB_ADDR] (default 127.0.0.1:9090)")
	fs.String("cacert", "", "PEM `file` of the certificate authorities of the servers [$FSB_CACERT]")
	fs.String("cert", "", "PEM `file` of the client certificate [$FSB_CERT]")
	fs.String("key", "", "PEM `file` of the key of the client certificate [$FSB_KEY]")
	fs.String("token-file", "", "`file` of a bearer token: of a ServiceAccount, for audience fast-sandbox.io, or an API key [$FSB_TOKEN_FILE, or the token itself in $FSB_TOKEN]")
	fs.Bool("insecure", false, "plaintext instead of mutual TLS; for experiments only [$FSB_INSECURE]")
	fs.StringP("namespace", "n", "", "`namespace` of sandboxes and pools [$FSB_NAMESPACE] (default \"default\")")
	fs.StringP("output", "o", "", "output `format`: table, wide, json, yaml or name [$FSB_OUTPUT]")
	fs.Duration("timeout", 0, "maximum `duration` of one call with its retries [$FSB_TIMEOUT] (default 1m)")
}

// Load loads the settings. getenv reads the environment. defaultFile is read if it exists and no other file is set. Load
// returns all errors at once, each with its source. An unknown key in the file is an error.
func Load(flags *pflag.FlagSet, getenv func(string) string, defaultFile string) (*Settings, error) {
	path, explicit := firstSet(flags.Lookup(fileFlag), getenv(fileEnv))
	if !explicit {
		path = defaultFile
	}
	file, err := read(path, explicit)
	if err != nil {
		return nil, err
	}
	s := &Settings{token: getenv(tokenEnv)}
	if file != nil {
		s.File = path
	}
	for _, k := range keys() {
		s.Values = append(s.Values, find(k, flags.Lookup(k.name), getenv, file, path))
	}
	return s, s.apply()
}

func firstSet(f *pflag.Flag, env string) (string, bool) {
	if f != nil && f.Changed {
		return f.Value.String(), true
	}
	return env, env != ""
}

func find(k key, f *pflag.Flag, getenv func(string) string, file map[string]string, path string) Value {
	if f != nil && f.Changed {
		return Value{k.name, f.Value.String(), "flag --" + k.name}
	}
	if v := getenv(EnvName(k.name)); v != "" {
		return Value{k.name, v, "environment " + EnvName(k.name)}
	}
	if v, ok := file[k.name]; ok {
		if slices.Contains(paths[:], k.name) && v != "" && !filepath.IsAbs(v) {
			v = filepath.Join(filepath.Dir(path), v)
		}
		return Value{k.name, v, "file " + path}
	}
	return Value{k.name, k.fallback, "default"}
}

func (s *Settings) apply() error {
	var problems []error
	for _, v := range s.Values {
		switch v.Key {
		case "addr":
			s.Addr = v.Value
		case "cacert":
			s.TLS.CAFile = v.Value
		case "cert":
			s.TLS.CertFile = v.Value
		case "key":
			s.TLS.KeyFile = v.Value
		case "token-file":
			s.TokenFile = v.Value
		case "insecure":
			switch v.Value {
			case "true", "1":
				s.TLS.Insecure = true
			case "false", "0":
			default:
				problems = append(problems, fmt.Errorf("%s: insecure is %q, want true or false", v.Source, v.Value))
			}
		case "namespace":
			s.Namespace = v.Value
		case "pool":
			s.Pool = v.Value
		case "output":
			switch s.Output = v.Value; s.Output {
			case "", "table", "wide", "json", "yaml", "name", "dot":
			default:
				problems = append(problems, fmt.Errorf("%s: output is %q, want table, wide, json, yaml or name", v.Source, v.Value))
			}
		case "timeout":
			d, err := time.ParseDuration(v.Value)
			if err != nil || d <= 0 {
				problems = append(problems, fmt.Errorf("%s: timeout is %q, want a positive duration such as 30s", v.Source, v.Value))
			}
			s.Timeout = d
		}
	}
	return errors.Join(problems...)
}

// HasToken reports whether calls carry a bearer token.
func (s *Settings) HasToken() bool { return s.token != "" || s.TokenFile != "" }

// Token returns the bearer token. It reads the file each time, because the kubelet replaces the tokens of Pods.
func (s *Settings) Token() (string, error) {
	if s.token != "" {
		return s.token, nil
	}
	raw, err := os.ReadFile(s.TokenFile)
	if err != nil {
		return "", fmt.Errorf("reading the token: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

// read returns the keys and values of the file; nil if the file is optional and does not exist.
func read(path string, explicit bool) (map[string]string, error) {
	if path == "" {
		return nil, nil
	}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !explicit {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading configuration: %w", err)
	}
	var tree map[string]any
	if err := yaml.UnmarshalStrict(raw, &tree); err != nil {
		return nil, fmt.Errorf("reading configuration %s: %w", path, err)
	}
	out := make(map[string]string, len(tree))
	var problems []error
	for name, value := range tree {
		if !slices.ContainsFunc(keys(), func(k key) bool { return k.name == name }) {
			problems = append(problems, fmt.Errorf("file %s: unknown field %q", path, name))
			continue
		}
		switch value.(type) {
		case map[string]any, []any, nil:
			problems = append(problems, fmt.Errorf("file %s: field %q: want a plain value", path, name))
		default:
			out[name] = fmt.Sprint(value)
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return out, errors.Join(problems...)
}
