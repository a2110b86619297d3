// Package config sets the flags of a command from the command line, the environment and a YAML file, in this order of
// precedence. It is the only package that reads the environment. Load and the functions that change a flag set run once,
// before anything else starts, and are not safe for concurrent use; Env and Environ are.
package config

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

// FileFlag is the name of the flag that names the YAML file.
const FileFlag = "config"

const envAnnotation = "fast-sandbox.io/env"

// AddFileFlag adds the flag that names the YAML file.
func AddFileFlag(fs *pflag.FlagSet) {
	fs.String(FileFlag, "", "YAML `file` of flag names and values; flags and environment take precedence")
}

// BindEnv adds an environment variable, by its exact name, from which a flag is read. It panics if there is no such flag.
func BindEnv(fs *pflag.FlagSet, flag, env string) {
	f := fs.Lookup(flag)
	if f == nil {
		panic("config: no flag " + flag) // a programming error that every start shows
	}
	if f.Annotations == nil {
		f.Annotations = map[string][]string{}
	}
	f.Annotations[envAnnotation] = append(f.Annotations[envAnnotation], env)
	f.Usage += " [$" + env + "]"
}

// Load sets every flag of cmd that the command line did not set: from the variables of BindEnv, else from PREFIX_FLAG_NAME,
// else from the file that --config names. It returns all problems at once, and each names the source of the value. A key of
// the file that is not a flag is a problem.
func Load(cmd *cobra.Command, prefix string) error {
	fs := cmd.Flags()
	var problems []error
	set := func(f *pflag.Flag, value, source string) {
		if err := fs.Set(f.Name, value); err != nil {
			problems = append(problems, fmt.Errorf("%s: setting --%s: %w", source, f.Name, err))
		}
	}
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			return
		}
		names := append(slices.Clone(f.Annotations[envAnnotation]), EnvName(prefix, f.Name))
		for _, name := range names {
			if value, ok := os.LookupEnv(name); ok && value != "" {
				set(f, value, "environment variable "+name)
				return
			}
		}
	})
	file := fs.Lookup(FileFlag)
	if file == nil || file.Value.String() == "" {
		return errors.Join(problems...)
	}
	values, err := readFile(file.Value.String())
	if err != nil {
		return errors.Join(append(problems, err)...)
	}
	for _, key := range sortedKeys(values) {
		f := fs.Lookup(key)
		switch {
		case f == nil || key == FileFlag || key == "help":
			problems = append(problems, fmt.Errorf("file %s: unknown field %q", file.Value, key))
		case !f.Changed:
			set(f, values[key], "file "+file.Value.String())
		}
	}
	return errors.Join(problems...)
}

// EnvName returns the name of the environment variable of a flag: `FSB`, `bind-address` -> `FSB_BIND_ADDRESS`.
func EnvName(prefix, flag string) string {
	return prefix + "_" + strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(flag))
}

// Env returns the value of an environment variable that does not set a flag, or "".
func Env(name string) string { return os.Getenv(name) }

// Environ returns the variables (NAME=value) whose names have one of the prefixes.
func Environ(prefixes ...string) []string {
	var out []string
	for _, kv := range os.Environ() {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(kv, p) }) {
			out = append(out, kv)
		}
	}
	return out
}

func readFile(path string) (map[string]string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading configuration: %w", err)
	}
	var tree map[string]any
	if err := yaml.UnmarshalStrict(raw, &tree); err != nil {
		return nil, fmt.Errorf("reading configuration %s: %w", path, err)
	}
	out := make(map[string]string, len(tree))
	for key, value := range tree {
		switch v := value.(type) {
		case []any:
			parts := make([]string, len(v))
			for i := range v {
				parts[i] = fmt.Sprint(v[i])
			}
			out[key] = strings.Join(parts, ",")
		case map[string]any:
			return nil, fmt.Errorf("reading configuration %s: field %q: want a plain value or a list", path, key)
		default:
			out[key] = fmt.Sprint(v)
		}
	}
	return out, nil
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
