package cmd

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// machine reports whether the output is for programs.
func (c *cli) machine() bool {
	return c.settings.Output == "json" || c.settings.Output == "yaml" || c.settings.Output == "name"
}

// print prints one message as JSON or YAML. It returns false if the format is another one.
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

// printJSON prints JSON, converted to YAML if that is the format.
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

// printList prints messages as JSON or YAML. It returns false if the format is another one.
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

// printNext prints one message of a stream as a line of JSON or a YAML document. It returns false if the format is another
// one.
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

// printNames prints lines of kind/name.
func (c *cli) printNames(kind string, names ...string) error {
	for _, name := range names {
		if _, err := fmt.Fprintf(c.Out, "%s/%s\n", kind, name); err != nil {
			return err
		}
	}
	return nil
}

// printSandbox prints one sandbox in the format of the output flag.
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
