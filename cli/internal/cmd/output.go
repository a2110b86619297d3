package cmd

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// machine tells whether the output is for programs.
func (c *cli) machine() bool {
	return c.settings.Output == "json" || c.settings.Output == "yaml" || c.settings.Output == "name"
}

// print writes one message in the machine formats; false if the format is for people.
func (c *cli) print(m proto.Message) (bool, error) {
	if c.settings.Output != "json" && c.settings.Output != "yaml" {
		return false, nil
	}
	raw, err := render.JSON(m)
	if err != nil {
		return true, err
	}
	return true, c.printJSON(raw)
}

// printJSON writes JSON, or the same as YAML.
func (c *cli) printJSON(raw []byte) error {
	if c.settings.Output == "yaml" {
		var err error
		if raw, err = render.YAML(raw); err != nil {
			return err
		}
	}
	_, err := c.Out.Write(raw)
	return err
}

// printList writes messages in the machine formats; false if the format is for people.
func printList[M proto.Message](c *cli, key string, items []M) (bool, error) {
	if c.settings.Output != "json" && c.settings.Output != "yaml" {
		return false, nil
	}
	raw, err := render.List(key, items)
	if err != nil {
		return true, err
	}
	return true, c.printJSON(raw)
}

// printNext writes one message of a stream as one document of many, if that is wanted: a line of JSON, or YAML after a
// separator.
func (c *cli) printNext(m proto.Message) (done bool, err error) {
	switch c.settings.Output {
	case "json":
		line, err := render.Line(m)
		if err != nil {
			return true, err
		}
		_, err = fmt.Fprintf(c.Out, "%s\n", line)
		return true, err
	case "yaml":
		raw, err := render.JSON(m)
		if err != nil {
			return true, err
		}
		if raw, err = render.YAML(raw); err != nil {
			return true, err
		}
		_, err = fmt.Fprintf(c.Out, "---\n%s", raw)
		return true, err
	}
	return false, nil
}

// printNames writes kind/name lines.
func (c *cli) printNames(kind string, names ...string) error {
	for _, name := range names {
		if _, err := fmt.Fprintf(c.Out, "%s/%s\n", kind, name); err != nil {
			return err
		}
	}
	return nil
}

// printSandbox writes one sandbox in whatever format is wanted.
func (c *cli) printSandbox(s *sandboxv1.Sandbox) error {
	if done, err := c.print(s); done {
		return err
	}
	if c.settings.Output == "name" {
		return c.printNames("sandbox", s.GetName())
	}
	columns := render.Columns{Wide: c.settings.Output == "wide"}
	t := render.Sandboxes(columns)
	t.Add(render.Row(columns, "", s, c.Clock.Now())...)
	return t.Flush(c.Out)
}

func names(list []*sandboxv1.Sandbox) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = s.GetName()
	}
	return out
}
