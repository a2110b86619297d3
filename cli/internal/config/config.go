// Package config finds fsb-ctl's settings: flags before environment before the configuration file before defaults. It
// remembers where each came from. It runs once, before anything else, and does no I/O but reading the file.
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

// Settings are what every command needs.
type Settings struct {
	// Addr is the allocator's gRPC target.
	Addr string
	// TLS of the connection.
	TLS rpc.TLS
	// Namespace of sandboxes and pools; Pool of new sandboxes.
	Namespace, Pool string
	// Output is the format of answers; empty for the command's own.
	Output string
	// Timeout bounds each call, retries included.
	Timeout time.Duration
	// File is the configuration file that was read; empty if there was none.
	File string
	// Values lists every setting with its source, in the order of Keys.
	Values []Value
}

// Value is one setting and where it came from.
type Value struct {
	// Key is the setting's name in the file, and its flag where it has one.
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

// key is one setting. Keys in the file, flags and (as FSB_KEY) environment variables have the same names.
type key struct{ name, fallback string }

func keys() []key {
	return []key{
		{"addr", "127.0.0.1:9090"},
		{"cacert", ""},
		{"cert", ""},
		{"key", ""},
		{"insecure", "false"},
		{"namespace", "default"},
		{"pool", "default"},
		{"output", ""},
		{"timeout", "1m"},
	}
}

// paths are the settings that are files; in the configuration file they may be relative to it.
var paths = [...]string{"cacert", "cert", "key"}

// EnvName is the environment variable of a setting.
func EnvName(key string) string { return "FSB_" + strings.ToUpper(key) }

// DefaultFile is where the configuration file is looked for when nobody names one; empty if there is no home.
func DefaultFile() string {
	dir, err := os.UserConfigDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "fast-sandbox", "config.yaml")
}

// AddFlags adds the flags that every command has. `pool` is none of them: it means another thing to run than to list.
func AddFlags(fs *pflag.FlagSet) {
	fs.String(fileFlag, "", "configuration `file` [$FSB_CONFIG] (default: fast-sandbox/config.yaml in the user's configuration directory)")
	fs.String("addr", "", "allocator's `host:port` [$FSB_ADDR] (default 127.0.0.1:9090)")
	fs.String("cacert", "", "PEM `file` of the authorities that the allocator's certificate is checked against [$FSB_CACERT]")
	fs.String("cert", "", "PEM `file` of the client certificate [$FSB_CERT]")
	fs.String("key", "", "PEM `file` of the client certificate's key [$FSB_KEY]")
	fs.Bool("insecure", false, "plaintext instead of mutual TLS; for experiments only [$FSB_INSECURE]")
	fs.StringP("namespace", "n", "", "`namespace` of sandboxes and pools [$FSB_NAMESPACE] (default \"default\")")
	fs.StringP("output", "o", "", "output `format`: table, wide, json, yaml or name [$FSB_OUTPUT]")
	fs.Duration("timeout", 0, "`time` that one call may take, retries included [$FSB_TIMEOUT] (default 1m)")
}

// Load finds the settings. getenv reads the environment; defaultFile is read if it exists and no other file is named.
// Every problem is returned at once, each naming its source; a key that the file has and we do not is one.
func Load(flags *pflag.FlagSet, getenv func(string) string, defaultFile string) (*Settings, error) {
	path, explicit := firstSet(flags.Lookup(fileFlag), getenv(fileEnv))
	if !explicit {
		path = defaultFile
	}
	file, err := read(path, explicit)
	if err != nil {
		return nil, err
	}
	s := &Settings{}
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
				problems = append(problems, fmt.Errorf("%s: timeout is %q, want a time above zero such as 30s", v.Source, v.Value))
			}
			s.Timeout = d
		}
	}
	return errors.Join(problems...)
}

// read returns the file's keys and values; nil if it need not exist and does not.
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
